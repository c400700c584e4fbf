"""What the ways to train on a batch that is too large cost in time, over that of the large batch, for a batch of 64 images.
benchmarks/memory.py measures their memory.

    python benchmarks/wholebatch.py            # print the tables, about 12 minutes on two cores
    python benchmarks/wholebatch.py --save     # and write them to benchmarks/results/wholebatch.json, which the docs show
    python benchmarks/wholebatch.py --pairs 2 --quick   # ResNet-50 at 64 pixels only
    python benchmarks/wholebatch.py --pairs 9 --dropout --save   # only small transformers with dropout, to benchmarks/results/dropout.json
"""
import argparse,contextlib,io,warnings
from functools import partial
from common import *
if __name__=='__main__': keep_memory()
warnings.filterwarnings('ignore')
from fastai.vision.all import *
from fastai.callback.progress import ProgressCallback
from torchvision.models import VisionTransformer
from fastai_accum.all import *

BS,SLICE,README = 64,8,('ResNet-50',64)   # what the README shows
def resnet(arch): return lambda px: create_vision_model(arch, 10, pretrained=False)
def vit(px): return VisionTransformer(px, 8, 8, 6, 192, 768, num_classes=10, dropout=.1)
nets = {'ResNet-18':resnet(resnet18), 'ResNet-50':resnet(resnet50), 'transformer':vit}
ways = {'the large batch':lambda bs: [], 'MicroBatch':lambda bs: MicroBatch(bs), 'coupled':lambda bs: MicroBatch(bs, coupled=True), 'exact':lambda bs: MicroBatch(bs, exact=True),
        'GradientCheckpointing':lambda bs: GradientCheckpointing(room=0), 'OffloadActivations':lambda bs: OffloadActivations(room=0)}

def learner(net, px, way, bs=SLICE):
    torch.manual_seed(0)
    device = default_device()
    batches = [(torch.randn(BS,3,px,px).to(device), torch.randint(10, (BS,)).to(device))]
    dls = DataLoaders(DataLoader(batches, bs=None), DataLoader(batches, bs=None), device=device)
    learn = Learner(dls, nets[net](px).to(device), loss_func=nn.CrossEntropyLoss(), opt_func=partial(SGD, mom=.9), lr=1e-3, cbs=[NoValid()]+L(ways[way](bs)))
    learn.remove_cb(ProgressCallback); learn.logger = noop
    with contextlib.redirect_stdout(io.StringIO()): learn.fit(1)   # the first epoch allocates what stays
    return learn

def costs(net, px, pairs):
    plain,rows = learner(net, px, 'the large batch'),[]
    for way in list(ways)[1:]:
        if way=='coupled' and (net,px)!=README: continue   # microbatch.py measures this in more cases
        learn = learner(net, px, way)
        t,pm = paired(partial(clock, partial(learn.fit, 1)), partial(clock, partial(plain.fit, 1)), pairs)
        rows.append(dict(net=net, px=px, way=way, time=t, pm=pm))
        print(f'{net} {px} {way}: {t:.2f}', flush=True)
    return rows

class Words(nn.Module):
    "A small transformer with dropout and `w` numbers for each of 8 words"
    def __init__(self, w):
        super().__init__()
        layer = nn.TransformerEncoderLayer(w, 4, 4*w, dropout=.1, batch_first=True)
        self.e,self.h = nn.Embedding(100, w),nn.Linear(w, 10)
        self.t = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    def forward(self, x): return self.h(self.t(self.e(x)).mean(1))

def dropout(w, pairs):
    "The time of `exact` against plain slices, where calls of Python cost more than numbers: 16 texts as 4 × 4"
    def text(**kwargs):
        torch.manual_seed(0)
        device = default_device()
        batches = [(torch.randint(100, (16,8), device=device), torch.randint(10, (16,), device=device)) for _ in range(16)]
        dls = DataLoaders(DataLoader(batches, bs=None), DataLoader(batches, bs=None), device=device)
        learn = Learner(dls, Words(w).to(device), nn.CrossEntropyLoss(), SGD, lr=1e-3, cbs=[NoValid(),MicroBatch(4, **kwargs)])
        learn.remove_cb(ProgressCallback); learn.logger = noop
        with contextlib.redirect_stdout(io.StringIO()): learn.fit(1)   # with the proof
        return learn
    plain,exact = text(),text(exact=True)
    t,pm = paired(partial(clock, partial(exact.fit, 1)), partial(clock, partial(plain.fit, 1)), pairs)
    return dict(width=w, time=t, pm=pm)

def widths(pairs, keep):
    rows = [dropout(w, pairs) for w in (32,64,128)]
    print('\nexact with dropout, without batch norm: 16 texts as 4 × 4; times of plain slices\n')
    print(table([(f"exact with dropout, width {r['width']}", f"{r['time']:.2f} ± {r['pm']:.2f}") for r in rows], ['model','time']))
    if keep: save('dropout', pairs=pairs, rows=rows)

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--pairs', type=int, default=3); p.add_argument('--save', action='store_true'); p.add_argument('--quick', action='store_true'); p.add_argument('--dropout', action='store_true')
    args = p.parse_args()
    print(machine())
    widths(args.pairs, args.save)
    if args.dropout: raise SystemExit
    rows = []
    for net,px in [README] if args.quick else [(net,px) for net in nets for px in (32,64)]: rows += costs(net, px, args.pairs)
    print(f'\n{BS} images, in slices of {SLICE} where they are sliced; time over that of the large batch (medians of {args.pairs} pairs)\n')
    print(table([(r['net'], r['px'], r['way'], f"{r['time']:.2f} ± {r['pm']:.2f}") for r in rows], ['model','pixels','way','time']))
    if args.save: save('wholebatch', batch=BS, slice=SLICE, pairs=args.pairs, rows=rows)
