"""How do other libraries' models and loops meet headrace? Through their public names, and through ours."""
