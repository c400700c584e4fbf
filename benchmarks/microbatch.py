"""What `MicroBatch` costs: time and exact peak memory of a batch of 64, in slices of 32 to 1, beside a loop written by hand.

    python benchmarks/microbatch.py            # print the table, about 20 minutes on two cores
    python benchmarks/microbatch.py --save     # and write it to benchmarks/results/microbatch.json, which the docs show
    python benchmarks/microbatch.py --pairs 4  # a quick look
"""
import argparse,warnings
from functools import partial
from common import *
if __name__=='__main__': keep_memory()
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastai_accum.microbatch import MicroBatch

BS,SLICES,FITS = 64,(32,16,8,4,2,1),16   # batch, slices, and the largest slice that fits when `auto` is measured

def conv_net():
    "A small convolutional network. Forward and backward pass take more than 30 ms for 16 images of 3 × 32 × 32 on two cores"
    layers = []
    for i,o in (3,32),(32,64),(64,128),(128,128): layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if o>32 else [])]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128,10))

class Transformer(nn.Module):
    "A small transformer that classifies sequences of 96 vectors"
    def __init__(self, d=192):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, 4, 4*d, dropout=0., batch_first=True)
        self.body,self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),nn.Linear(d, 10)
    def forward(self, x): return self.head(self.body(x).mean(1))

class Limited(nn.Module):
    "Runs out of memory for more than `FITS` samples"
    def __init__(self, model): super().__init__(); self.model = model
    def forward(self, x):
        if len(x)>FITS: raise RuntimeError('out of memory, as on a small GPU')
        return self.model(x)

nets = dict(convolutional=(conv_net, (3,96,96)), transformer=(Transformer, (96,192)))   # a sample takes 15 ms or more, as is usual where memory is short

def learner(net, cbs=None, bs=BS, n=1, wrap=noop):
    make,shape = nets[net]
    torch.manual_seed(0)
    device = default_device()
    batches = [(torch.randn(bs, *shape).to(device), torch.randint(10, (bs,)).to(device)) for _ in range(n)]
    dls = DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None), device=device)
    learn = Learner(dls, wrap(make()).to(device), loss_func=nn.CrossEntropyLoss(), opt_func=partial(SGD, mom=.9), lr=1e-3, cbs=[NoValid()]+L(cbs))
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

def by_hand(learn, bs):
    "One epoch of a plain loop, as you would write it by hand, with the same optimizer and loader"
    model,opt,loss_func = learn.model.train(),learn.opt,learn.loss_func
    def f():
        for x,y in learn.dls.train:
            for xs,ys in zip(x.split(bs), y.split(bs)): (loss_func(model(xs), ys)*(len(ys)/len(y))).backward()
            opt.step(); opt.zero_grad()
    return f

def epoch(learn):
    "A function that trains an epoch. It has run once, so that the clock does not see what only the first epoch does"
    learn.fit(1)
    return partial(learn.fit, 1)

def costs(net, pairs):
    whole,rows = epoch(learner(net)),[]
    for bs in SLICES:
        plain,coupled = epoch(learner(net, MicroBatch(bs))),epoch(learner(net, MicroBatch(bs, coupled=True)))
        hand,small = learner(net),epoch(learner(net, bs=bs))
        hand.create_opt()
        hand = by_hand(hand, bs); hand()
        time = lambda a, b: paired(partial(clock, a), partial(clock, b), pairs)
        mem = {k:peak_bytes(f) for k,f in dict(whole=whole, plain=plain, coupled=coupled, small=small).items()}
        (h,pm),(c,cpm),(w,_) = time(plain, hand),time(coupled, plain),time(plain, whole)
        rows.append(dict(net=net, bs=bs, hand=h, hand_pm=pm, coupled=c, coupled_pm=cpm, whole=w, mem=mem['plain']/2**20, mem_whole=mem['whole']/2**20,
                         mem_small=mem['plain']/mem['small'], mem_coupled=mem['coupled']/mem['plain']))
    return rows

def auto(net, pairs):
    "Samples per second of `auto` after its first ten batches, divided by those of the best slice that fits, picked by hand"
    first = learner(net, MicroBatch(), n=10, wrap=Limited)
    first.fit(1)
    first.dls = learner(net).dls   # fewer batches, so that it takes less time
    found = partial(first.fit, 1)
    picked = {bs:epoch(learner(net, MicroBatch(bs), wrap=Limited)) for bs in SLICES if 4<=bs<=FITS}
    best = min(picked, key=lambda bs: min(clock(picked[bs]) for _ in range(3)))
    r,pm = paired(partial(clock, picked[best]), partial(clock, found), pairs)
    return dict(net=net, best=best, ratio=r, pm=pm)

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--pairs', type=int, default=12); p.add_argument('--save', action='store_true'); args = p.parse_args()
    print(machine())
    torch.manual_seed(0)
    autos = [auto(net, args.pairs) for net in nets]
    rows = [r for net in nets for r in costs(net, args.pairs)]
    print(f'\nA batch of {BS} in slices (medians of {args.pairs} pairs)\n')
    print(table([(r['net'], r['bs'], f"{r['hand']:.3f} ± {r['hand_pm']:.3f}", f"{r['whole']:.2f}", f"{r['mem']:.1f} of {r['mem_whole']:.1f} MiB", f"{r['mem_small']:.3f}",
                  f"{r['coupled']:.2f} ± {r['coupled_pm']:.2f}", f"{r['mem_coupled']:.3f}") for r in rows],
                ['network','slice','time over a loop by hand','over the whole batch','peak memory','over a batch of that size','coupled: time over plain','memory over plain']))
    print("\nThroughput of bs='auto' over the best slice picked by hand\n")
    print(table([(a['net'], a['best'], f"{a['ratio']:.3f} ± {a['pm']:.3f}") for a in autos], ['network','best slice','ratio']))
    if args.save: save('microbatch', batch=BS, pairs=args.pairs, rows=rows, auto=autos)
