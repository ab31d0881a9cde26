"""Datasets, and how their samples become micro-batches.

A dataset is map-style: `len(dataset)` and `dataset[i] -> (input, target)`. The kit calls what `data._target_` names
once with `train=True` and once with `train=False`, if it has such a parameter, as torchvision's datasets do.
What else it may have, all of it optional:

    __getitems__(indices)      the whole micro-batch at once, as a tuple of batched tensors
    augment(batch, keys)       random changes to a training batch; keys: [B] uint64, one for each (seed, epoch, sample)
    num_classes, input_shape   what the model is built for (input_shape is taken from sample 0 otherwise)
    prepare(**config)          a classmethod that downloads; called on one rank of each node before the rest
    fingerprint()              a string that changes when the data does
"""
