"""Objectives: the loss to minimize and the metrics to measure.

An objective is called with `(outputs, targets)` and returns the mean loss over the micro-batch's samples, `[] float`.
Its `metrics` method, if it has one, returns sums over samples: evaluation adds them up over ranks and divides by the
number of samples. Any loss of torch.nn with the mean reduction is an objective. Where its mean is not over samples,
counted.py says over what, or its method `count` does.
"""
