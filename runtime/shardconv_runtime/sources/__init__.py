"""An ordinary model, in a directory or on the Hub: what it is, and where the bytes of its parameters are.

``locate`` finds (or downloads) the directory, ``config`` reads the configuration and finds the model
class, ``checkpoint`` finds and validates the weight files, ``resolve`` makes these one frozen value, and
``weights`` finds what each parameter is made of.
"""
