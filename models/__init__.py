"""Models as lists of Keras layers, unaware of pipelining."""
