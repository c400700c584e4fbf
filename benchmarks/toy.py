"""The experiment that everyone starts with: a network of two layers and four samples, in one batch and in two micro-batches of two.

    python benchmarks/toy.py    # prints the gradients of the first layer: with a mean loss, and with a sum"""
import warnings
from common import *
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai_accum.core import AccumulateStep

def gradient(bs, reduction, n_step=1):
    "The gradient of the first layer that reaches the optimizer"
    set_seed(0)
    x,y = torch.randn(4, 2).double(),torch.randn(4, 1).double()
    model = nn.Sequential(nn.Linear(2,3), nn.Tanh(), nn.Linear(3,1)).double()
    seen = []
    note = Callback(before_step=lambda cb: seen.append(cb.learn.model[0].weight.grad.clone()))
    batches = list(zip(x.split(bs), y.split(bs)))
    cbs = [TrainEvalCallback, NoValid(), note, *([AccumulateStep(n_step, average=reduction=='mean')] if n_step>1 else [])]
    Learner(DataLoaders(DataLoader(batches, bs=None), DataLoader(batches, bs=None)), model, loss_func=nn.MSELoss(reduction=reduction), default_cbs=False, cbs=cbs).fit(1)
    assert len(seen)==1, 'one step'
    return seen[0]

if __name__=='__main__':
    torch.set_printoptions(precision=12)
    for reduction in 'mean','sum':
        one,two = gradient(4, reduction),gradient(2, reduction, n_step=2)
        print(f'\n{reduction}: one batch of 4\n{one.numpy()}\n{reduction}: two micro-batches of 2\n{two.numpy()}')
        print(f'largest difference {(one-two).abs().max().item():.0e}')
        assert torch.allclose(one, two, rtol=1e-12)
