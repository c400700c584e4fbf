"""What `AccumulateStep` costs: time (the median of the ratios of runs that take turns), exact peak memory of a training step, and the time to import.

    python benchmarks/overhead.py            # print the tables, about ten minutes on two cores
    python benchmarks/overhead.py --save     # and write them to benchmarks/results/overhead.json, which the README shows
    python benchmarks/overhead.py --pairs 4  # a quick look
"""
import argparse,subprocess,sys,warnings
from functools import partial
from common import *
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastai.callback.training import GradientAccumulation
from fastai_accum.core import AccumulateStep

BS,N_STEP = 16,4

def conv_net():
    "A small convolutional network. Forward and backward pass take more than 30 ms for 16 images of 3 × 32 × 32 on two cores"
    layers = []
    for i,o in (3,32),(32,64),(64,128),(128,128): layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if o>32 else [])]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128,10))
def tiny_net(): return nn.Sequential(nn.Flatten(), nn.Linear(48,10))

nets = dict(conv=(conv_net, (3,32,32), 10), tiny=(tiny_net, (3,4,4), 202))   # network, shape of a sample, micro-batches in an epoch, with a tail

def data(shape, n):
    g = torch.Generator().manual_seed(0)
    device = default_device()
    batches = [(torch.randn(BS, *shape, generator=g).to(device), torch.randint(10, (BS,), generator=g).to(device)) for _ in range(n)]
    return DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None), device=device)

def learner(net, cbs=None, opt_func=partial(SGD, mom=.9)):
    make,shape,n = nets[net]
    torch.manual_seed(0)
    learn = Learner(data(shape, n), make().to(default_device()), loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, lr=1e-3, cbs=[NoValid()]+L(cbs))
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

def by_hand(learn):
    "One epoch of a plain loop, as you would write it by hand, with the same optimizer, loader and rule for the tail"
    model,opt,loss_func,dl = learn.model.train(),learn.opt,learn.loss_func,learn.dls.train
    def f():
        n,last = 0,len(dl)-1
        for i,(x,y) in enumerate(dl):
            (loss_func(model(x), y)*len(y)).backward()
            n += len(y)
            if (i+1)%N_STEP==0 or i==last:
                for p in model.parameters(): p.grad /= n
                opt.step(); opt.zero_grad(); n = 0
    return f

ours   = lambda: AccumulateStep(n_step=N_STEP)
theirs = lambda: GradientAccumulation(N_STEP*BS)

def times(pairs):
    rows = []
    for net in nets:
        fit = lambda cb=None: partial(learner(net, cb).fit, 1)
        acc,plain,fastais = fit(ours()),fit(),fit(theirs())
        hand = learner(net); hand.create_opt()
        others = {'the same Learner, a step each micro-batch':plain, "fastai's GradientAccumulation":fastais, 'a loop written by hand':by_hand(hand)}
        for f in [acc, *others.values()]: f()
        ms = clock(acc)/nets[net][2]*1000
        for name,f in others.items():
            r,pm = paired(partial(clock, acc), partial(clock, f), pairs)
            rows.append((net, f'{ms:.1f}', name, f'{r:.3f}', f'± {pm:.3f}'))
    return rows

def memory():
    rows = []
    torchs = {f'torch {o.__name__}':partial(OptimWrapper, opt=o) for o in (torch.optim.SGD, torch.optim.AdamW)}
    for name,opt in dict(SGD=partial(SGD, mom=.9), Adam=Adam, **torchs).items():
        res = {}
        for k,cb in dict(plain=None, ours=ours(), fastais=theirs()).items():
            learn = learner('conv', cb, opt)
            learn.fit(1)
            res[k] = peak_bytes(partial(learn.fit, 1))
        rows.append((name, f"{res['plain']/2**20:.2f} MiB", f"{res['ours']/res['plain']:.4f}", f"{res['ours']/res['fastais']:.4f}"))
    return rows

def import_ms(n=7):
    code = 'import time, fastai.basics; t=time.perf_counter(); import fastai_accum.all; print(1000*(time.perf_counter()-t))'
    once = lambda: float(subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, check=True).stdout)
    return statistics.median(once() for _ in range(n))

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--pairs', type=int, default=30); p.add_argument('--save', action='store_true'); args = p.parse_args()
    print(machine())
    t,m,i = times(args.pairs),memory(),import_ms()
    print(f'\nTime of an epoch with AccumulateStep(n_step={N_STEP}) at batch size {BS}, over that of … (median of {args.pairs} pairs)\n')
    print(table(t, ['network','ms a micro-batch','over','ratio','noise']))
    print('\nPeak memory of training, conv network\n')
    print(table(m, ['optimizer','plain run at the same batch size','ratio to it',"ratio to fastai's callback"]))
    print(f'\n`import fastai_accum.all` after `import fastai.basics`: {i:.0f} ms')
    if args.save: save('overhead', pairs=args.pairs, times=t, memory=m, import_ms=round(i,1))
