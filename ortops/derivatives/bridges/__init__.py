"""A Function as a function or module of other libraries, each loaded when it is used."""
