"""What the ways to train on a batch that is too large cost: peak memory and time of each over the large batch, for a batch of 64 images.

    python benchmarks/wholebatch.py            # print the tables, about 12 minutes on two cores
    python benchmarks/wholebatch.py --save     # and write them to benchmarks/results/wholebatch.json, which the docs show
    python benchmarks/wholebatch.py --pairs 2 --quick   # ResNet-50 at 64 pixels only
    python benchmarks/wholebatch.py --pairs 9 --dropout --save   # only small transformers with dropout, to benchmarks/results/dropout.json

Memory is the peak of what a training step allocates. Every allocation is counted; gradients are allocated before the step and so do not count.
What `exact` and `OffloadActivations` copy to the host is counted separately, in the column "on the host". Without a GPU, `apart` in common.py lets them
copy all the same, to memory that does not count as the device's.
"""
import argparse,contextlib,io,warnings,weakref
from functools import partial
from common import *
if __name__=='__main__': keep_memory()
warnings.filterwarnings('ignore')
from fastai.vision.all import *
from fastai.callback.progress import ProgressCallback
from torchvision.models import VisionTransformer
from fastai_accum.all import *
from fastai_accum.memory.offload import Host

BS,README = 64,('ResNet-50',64)   # what the README shows
def resnet(arch): return lambda px: create_vision_model(arch, 10, pretrained=False)
def vit(px): return VisionTransformer(px, 8, 8, 6, 192, 768, num_classes=10, dropout=.1)
nets = {'ResNet-18':resnet(resnet18), 'ResNet-50':resnet(resnet50), 'transformer':vit}
ways = {'the large batch':lambda bs: [], 'MicroBatch':lambda bs: MicroBatch(bs), 'coupled':lambda bs: MicroBatch(bs, coupled=True), 'exact':lambda bs: MicroBatch(bs, exact=True),
        'GradientCheckpointing':lambda bs: GradientCheckpointing(), 'OffloadActivations':lambda bs: OffloadActivations()}

def learner(net, px, way, bs=8):
    torch.manual_seed(0)
    device = default_device()
    batches = [(torch.randn(BS,3,px,px).to(device), torch.randint(10, (BS,)).to(device))]
    dls = DataLoaders(DataLoader(batches, bs=None), DataLoader(batches, bs=None), device=device)
    learn = Learner(dls, nets[net](px).to(device), loss_func=nn.CrossEntropyLoss(), opt_func=partial(SGD, mom=.9), lr=1e-3, cbs=[NoValid()]+L(ways[way](bs)))
    learn.remove_cb(ProgressCallback); learn.logger = noop
    with contextlib.redirect_stdout(io.StringIO()): learn.fit(1)   # the first epoch allocates what stays
    return learn

@contextmanager
def counting(host):
    "Count the peak of the bytes that are on the host"
    put,now = Host.room,[0]
    def room(self, t):
        res = put(self, t)
        n = t.numel()*t.element_size()
        now[0] += n; host[0] = max(host[0], now[0])
        weakref.finalize(res, lambda: now.__setitem__(0, now[0]-n))
        return res
    Host.room = room
    try: yield
    finally: Host.room = put

def memory(net, px, way, bs=8):
    "Peak bytes on the device and on the host"
    learn,host = learner(net, px, way, bs),[0]
    with apart(),counting(host): n = peak_bytes(partial(learn.fit, 1))
    return n,host[0]

def costs(net, px, pairs, large):
    plain,rows = learner(net, px, 'the large batch'),[]
    for way in list(ways)[1:]:
        if way=='coupled' and (net,px)!=README: continue   # microbatch.py measures this in more cases
        n,host = memory(net, px, way)
        learn = learner(net, px, way)
        t,pm = paired(partial(clock, partial(learn.fit, 1)), partial(clock, partial(plain.fit, 1)), pairs)
        rows.append(dict(net=net, px=px, way=way, large=large/2**20, memory=n/large, host=host/large, time=t, pm=pm))
    return rows

def slopes(net, px, large):
    "Memory by the number of slices"
    return [dict(net=net, px=px, way=way, slices=k, memory=memory(net, px, way, BS//k)[0]/large) for k in (4,8,16,32) for way in ('MicroBatch','exact')]

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
    rows,steps = [],[]
    for net,px in [('ResNet-50',64)] if args.quick else [(net,px) for net in nets for px in (32,64)]:
        large,_ = memory(net, px, 'the large batch')
        rows += costs(net, px, args.pairs, large)
        if px==64 and net!='ResNet-18': steps += slopes(net, px, large)
        for r in rows:
            if (r['net'],r['px'])==(net,px): print(f"{net} {px} {r['way']}: {r['memory']:.3f}, time {r['time']:.2f}", flush=True)
    print(f'\n{BS} images, in slices of 8 where they are sliced; shares of the large batch (medians of {args.pairs} pairs)\n')
    print(table([(r['net'], r['px'], f"{r['large']:.0f} MiB", r['way'], f"{r['memory']:.3f}", f"{r['host']:.2f}", f"{r['time']:.2f} ± {r['pm']:.2f}") for r in rows],
                ['model','pixels','large batch','way','memory','on the host','time']))
    print('\nMemory by the number of slices\n')
    print(table([(s['net'], s['way'], s['slices'], f"{s['memory']:.3f}") for s in steps], ['model','way','slices','memory']))
    if args.save: save('wholebatch', batch=BS, slice=8, pairs=args.pairs, rows=rows, slopes=steps)
