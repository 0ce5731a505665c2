"""What people run: the command line and the programs behind it. Nothing in the library imports them."""
