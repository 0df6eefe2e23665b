"""How is a service told what to do? Its variables, its flags, and the help about them."""
