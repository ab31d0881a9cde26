"""Datasets, and how their samples become micro-batches.

A dataset is map-style: `len(dataset)` and `dataset[i] -> (input, target)`. The kit calls what `data._target_` names
once with `train=True` and once with `train=False`, if it has such a parameter, as torchvision's datasets do.
What else it may have, all of it optional:

    __getitems__(indices, keys)   the whole micro-batch at once, as a pair of batched tensors; what is random in it may
                                  depend on keys alone: [B] uint64, one for each (seed, epoch, sample). It is asked some
                                  batches before they are trained on
    num_classes, input_shape      what the model is built for (input_shape is taken from sample 0 otherwise)
    prepare(**values)             a classmethod that downloads; called on one rank of each node before the rest
    fingerprint()                 a string that changes when the data does
"""
