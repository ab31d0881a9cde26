"""What is minimised and what is measured.

An objective is called with `(outputs, targets)` and gives the mean loss over the micro-batch's samples, `[] float`.
Its `metrics`, where it has them, gives sums over samples: evaluation adds them up over ranks and divides by the
number of samples. Any loss of torch.nn with the mean reduction serves as one.
"""
