"""How do other libraries' models and loops meet millrace? Over their public names, and over ours."""
