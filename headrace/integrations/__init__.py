"""How do other libraries' models and loops meet headrace? Over their public names, and over ours."""
