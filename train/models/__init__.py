"""Built-in models. Each is built from its config and, where its parameters name them, the data's input_shape and num_classes."""
