import torch
torch.set_num_threads(1)   # the tensors are tiny, and threads that wait for each other make a busy machine ten times slower
