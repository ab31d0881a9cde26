"""Datasets, and how a run loads them.

A dataset is map-style: `len(dataset)` and `dataset[i] -> (input, target)`. Like torchvision's datasets, the target of
`data._target_` is called once with `train=True` and once with `train=False`, if it has such a parameter. Optional
members:

    __getitems__(indices, keys)   returns the whole micro-batch, a pair of batched tensors; its randomness may depend on
                                  keys alone: [B] uint64, one for each (seed, epoch, sample). It is called some batches
                                  ahead of training
    num_classes, input_shape      properties that the model is built for (input_shape defaults to that of sample 0)
    sample_weights                one number for each sample: an epoch draws len(dataset) samples with these weights, with
                                  replacement, as torch's WeightedRandomSampler does
    tokens_per_sample             property of text: records then have tokens per second, too
    prepare(**values)             a classmethod that downloads; called before the rest on one of the ranks that see the same
                                  folder `root`, or without `root` on one rank of each node
    compact(), expand(inputs)     for GPUs: the same data set with smaller samples, such as uint8 pixels, and what makes of
                                  them, on the GPU, the inputs that the data set itself gives
    fingerprint()                 returns a string that changes when the data does
"""
