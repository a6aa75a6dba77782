"""An ordinary model, in a directory or on the Hub: what it is, and where the bytes of its parameters are."""
