"""What `NoiseScale` costs: the time of an epoch with it over the time without it (the median of the ratios of runs that take turns), and exact peak memory.

    python benchmarks/noise.py            # print the table, about five minutes on two cores
    python benchmarks/noise.py --save     # and write it to benchmarks/results/noise.json
    python benchmarks/noise.py --pairs 4  # a quick look
"""
import argparse,warnings
from functools import partial
from common import *
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastai_accum.core import AccumulateStep
from fastai_accum.know.noise import NoiseScale

BS,N_STEP = 16,4

def conv_net():
    "A small convolutional network: 0.2 million parameters, most of the time in its activations"
    layers = []
    for i,o in (3,32),(32,64),(64,128),(128,128): layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if o>32 else [])]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128,10))

def linear_net():
    "Four million parameters, and few samples: most of the time goes into passes over the gradients, so this is the worst case"
    return nn.Sequential(nn.Flatten(), nn.Linear(3072,1024), nn.ReLU(), nn.Linear(1024,1024), nn.ReLU(), nn.Linear(1024,10))

nets = dict(conv=(conv_net, 16), linear=(linear_net, 48))   # network, micro-batches in an epoch

def learner(net, *cbs):
    make,n = nets[net]
    torch.manual_seed(0)
    g,device = torch.Generator().manual_seed(0),default_device()
    batches = [(torch.randn(BS, 3, 32, 32, generator=g).to(device), torch.randint(10, (BS,), generator=g).to(device)) for _ in range(n)]
    dls = DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None), device=device)
    learn = Learner(dls, make().to(device), loss_func=nn.CrossEntropyLoss(), lr=1e-3, cbs=[NoValid(), AccumulateStep(N_STEP), *cbs])
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

def rows(pairs):
    for net in nets:
        plain = learner(net)
        fits = [partial(o.fit, 1) for o in (learner(net, NoiseScale()),plain)]
        for f in fits: f()
        r,pm = paired(*(partial(clock, f) for f in fits), pairs)
        mem = peak_bytes(fits[0])/peak_bytes(fits[1])
        yield net,f'{clock(fits[1])/nets[net][1]*1000:.1f}','NoiseScale()',f'{r:.3f}',f'± {pm:.3f}',f'{mem:.4f}'

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--pairs', type=int, default=30); p.add_argument('--save', action='store_true'); args = p.parse_args()
    print(machine())
    res = list(rows(args.pairs))
    print(f'\nTime of an epoch of AccumulateStep(n_step={N_STEP}) and Adam at batch size {BS}, with the callback over without (median of {args.pairs} pairs)\n')
    print(table(res, ['network','ms a micro-batch','with','ratio','noise','peak memory']))
    if args.save: save('noise', pairs=args.pairs, rows=res)
