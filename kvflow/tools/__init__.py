"""Programs around the library: the command line and what it runs. The library imports none of them."""
