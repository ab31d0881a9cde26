"""Built-in models, built from the config and, if the constructor has them, the data's input_shape and num_classes."""
