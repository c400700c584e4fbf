"""What each way to train takes in memory, counted by the allocator of an accelerator, and how exact it is there.

    python benchmarks/memory.py            # print the tables, about an hour on one core
    python benchmarks/memory.py --save     # and write them to benchmarks/results/memory.json, which the docs show
    python benchmarks/memory.py --save --only places U-Net   # these again: networks of the first two tables, or the tables `places` and `rooms`

Without an accelerator whose allocator counts, it takes the simulated one in tests/simulated, which runs on the CPU and is slow.

Memory is what a training step allocates at its peak, on top of weights, gradients and the state of the optimizer. Gradients are allocated before the step.
Pinned memory is that of the host, where `exact=True` and `OffloadActivations` keep activations. After each run, nothing may be left on the device.
"""
import argparse,gc,io,warnings
from contextlib import contextmanager,nullcontext,redirect_stdout
from functools import partial
from unittest.mock import patch as replaced
from common import *
warnings.filterwarnings('ignore')
from fastai.vision.all import *
from fastai.callback import fp16
from fastai.callback.progress import ProgressCallback
from fastai_accum.all import *
from fastai_accum.devices import accelerator,api,counts_memory
from fastai_accum.memory.offload import Copies
from fastai_accum.turns import Saved
import checkpointing,wholebatch

def counted():
    "The accelerator of this machine if its allocator counts, otherwise the simulated one"
    d = accelerator()
    if d and counts_memory(d): return torch.device(d.type, 0)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'tests'/'simulated'))
    import fakegpu
    return torch.device('fakegpu', 0)

def is_simulated(device): return device.type=='fakegpu'
def by(device): return 'the allocator of ' + ('a simulated accelerator' if is_simulated(device) else name_of(device))

def peaks(learn, device):
    "The peaks of a step of `learn`, on `device` and of pinned memory, in bytes"
    on = api(device)
    for p in learn.model.parameters():   # also those of weights that the model does not use
        if p.grad is None: p.grad = torch.zeros_like(p)
    with redirect_stdout(io.StringIO()): quiet(learn).fit(1)   # with the proof of `exact`, and the optimizer's state
    gc.collect(); on.synchronize(device)
    before,is_pinned = on.memory_allocated(device),hasattr(on, 'host_memory_stats')
    if is_pinned: on.reset_peak_host_memory_stats()
    n = peak_bytes(partial(learn.fit, 1), device)
    pinned = on.host_memory_stats()['active_bytes.peak'] if is_pinned else 0
    gc.collect(); on.synchronize(device)
    left = on.memory_allocated(device)-before
    assert not left, f'{left} bytes are left on the device'
    if is_simulated(device): assert not (races := on.races()), races
    return n,pinned

def quiet(learn):
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

# ---- ways to train, and networks

plain = {'AccumulateStep(n_step)':lambda n, bs: AccumulateStep(n_step=n//bs), 'AccumulateStep(n_samples)':lambda n, bs: AccumulateStep(n_samples=n)}   # the loader has small batches
slices = {'MicroBatch':lambda n, bs: MicroBatch(bs), 'coupled':lambda n, bs: MicroBatch(bs, coupled=True)}
whole = {'exact':lambda n, bs: MicroBatch(bs, exact=True), 'exact, half':lambda n, bs: MicroBatch(bs//2, exact=True),
         'GradientCheckpointing':lambda n, bs: GradientCheckpointing(room=0), 'OffloadActivations':lambda n, bs: OffloadActivations(room=0)}
ways = {'AccumulateStep':plain['AccumulateStep(n_step)'], **slices, **whole}

class Block(nn.Module):
    "Two convolutions of `c` channels around what comes in, with norms and dropout unless `norm` is `False`"
    def __init__(self, c, norm=True, p=0.):
        super().__init__()
        def conv(): return nn.Conv2d(c, c, 3, padding=1, bias=not norm), nn.BatchNorm2d(c) if norm else nn.Identity()
        self.layers = nn.Sequential(*conv(), nn.ReLU(), *conv(), nn.Dropout(p) if p else nn.Identity())
    def forward(self, x): return F.relu(x+self.layers(x))

def blocks(n=6, c=16, **kwargs):
    return nn.Sequential(nn.Conv2d(3, c, 3, padding=1), *[Block(c, **kwargs) for _ in range(n)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10))

def unet(px): return create_unet_model(resnet18, 10, (px,px), pretrained=False)

# the network, the pixels of an image, the images of a batch and of a slice
nets = {'ResNet-50':(wholebatch.nets['ResNet-50'], 64, 64, 8), 'ResNet-18':(wholebatch.nets['ResNet-18'], 64, 32, 4),
        'transformer':(wholebatch.nets['transformer'], 64, 64, 8), 'U-Net':(unet, 64, 32, 4), 'six blocks':(lambda px: blocks(), 32, 32, 8)}

def learner(net, way, device):
    "A learner with `way`, or with the large or the small batch if it says so"
    make,px,n,bs = nets[net]
    torch.manual_seed(0)
    xs,ys = torch.randn(2*n,3,px,px),torch.randint(10, (2*n,px,px) if net=='U-Net' else (2*n,))
    dl = DataLoader(list(zip(xs, ys)), bs=bs if way in ('small','AccumulateStep') else n, device=device)
    return Learner(DataLoaders(dl, dl, device=device), make(px).to(device), nn.CrossEntropyLoss(), SGD, lr=1e-3, cbs=[NoValid()]+L(way in ways and ways[way](n, bs) or None))

def shares(net, device):
    "A row for each way, in shares of the large batch"
    _,px,n,bs = nets[net]
    def measure(way): return peaks(learner(net, way, device), device)
    (large,_),(small,_) = measure('large'),measure('small')
    for way in ways:
        mem,pinned = measure(way)
        res = dict(net=net, images=n, px=px, slice=bs//2 if 'half' in way else bs, way=way, large=large/2**20, memory=mem/large, pinned=pinned/large)
        if way=='AccumulateStep': res['over_small'] = mem/small
        print(f"{net}, {way}: {res['memory']:.3f}, pinned {res['pinned']:.2f}", flush=True)
        yield res

def architecture(net, device):
    "What `GradientCheckpointing` and `OffloadActivations` save, with what is there anyway: parameters and buffers, then gradients and the state of Adam"
    def measure(cb=None):
        with redirect_stdout(io.StringIO()): learn = checkpointing.learner(net, cb, device)
        return peaks(learn, device)[0],*held_bytes(learn)
    (p,held,more),(c,*_),(o,*_) = measure(),measure(GradientCheckpointing(room=0)),measure(OffloadActivations(room=0))
    print(f'{net}: {c/p:.3f}, {o/p:.3f}', flush=True)
    return dict(net=net, step=p/2**20, parameters=held/2**20, more=more/2**20, checkpointing=c/p, offload=o/p)

# ---- what fits stays

rooms = .5,.75,.95,1.,1.1,1.2   # of the peak of the plain run
in_rooms = dict(checkpointing=lambda **kw: [GradientCheckpointing(**kw)], offload=lambda **kw: [OffloadActivations(**kw)], both=lambda **kw: [GradientCheckpointing(**kw), OffloadActivations(**kw)])

@contextmanager
def held_to(limit, device):
    "A block in which `device` gives no more than `limit` bytes"
    on = api(device)
    def hold(n):
        if is_simulated(device): on.set_limit(n)
        else: on.set_per_process_memory_fraction(n/on.get_device_properties(device).total_memory if n else 1., device)
    hold(limit)
    try: yield
    finally: hold(None)

def later_step(cbs, device, limit=None):
    "Of twelve blocks: how many run again in the last of six steps, the bytes that it moves there and back, and the peak of all, weights included"
    n = Counter()
    def counted(f, k, size):
        def g(o, *args): n[k] += size(*args); return f(o, *args)
        return g
    count = Callback(before_batch=lambda cb: n.clear())
    torch.manual_seed(0)
    dl = DataLoader(list(zip(torch.randn(6*32,3,16,16), torch.randint(10, (6*32,)))), bs=32, device=device)
    learn = quiet(Learner(DataLoaders(dl, dl, device=device), blocks(12).to(device), nn.CrossEntropyLoss(), SGD, lr=1e-3, cbs=[NoValid(), count, *cbs]))
    gc.collect()
    with (held_to(limit, device), replaced.object(Saved, 'run', counted(Saved.run, 'again', lambda: 1)), replaced.object(Copies, '_send', counted(Copies._send, 'moved', lambda t, host: t.nbytes)),
          replaced.object(Copies, '_start', counted(Copies._start, 'moved', lambda o: o.t.nbytes)), redirect_stdout(io.StringIO())):
        api(device).reset_peak_memory_stats(device)
        learn.fit(1)
    return n['again'],n['moved'],api(device).max_memory_allocated(device)

def what_stays(device):
    "A row for each share of the memory of plain training"
    _,_,peak = later_step([], device)
    for share in (0,*rooms):
        res = dict(share=share, peak=peak)
        for k,make in in_rooms.items():
            again,moved,most = later_step(make(room=None if share else 0), device, int(share*peak))
            res[k] = dict(again=again, moved=moved, peak=most/peak)
        print(res, flush=True)
        yield res

# ---- ways × places

LARGE,SMALL,N = 32,8,76   # 76 images: the last batch of 32 has 12, and the last one of 8 has 4

def small_learner(way, device, is_half, is_large):
    "A learner with `way`, or with the large batch, for a network with batch norm and dropout if `way` is exact for them"
    torch.manual_seed(0)
    model = blocks(3, 8, p=.2) if way in whole else blocks(3, 8, norm=False)
    dtype = torch.float32 if is_half else torch.float64
    data = [(x,i%10) for i,x in enumerate(torch.randn(N, 3, 16, 16).to(dtype))]
    dl = DataLoader(data, bs=SMALL if way in plain and not is_large else LARGE, device=device)
    cbs = [NoValid(), *([] if is_large else [{**plain, **slices, **whole}[way](LARGE, SMALL)]), *([MixedPrecision(init_scale=2**10)] if is_half else [])]
    learn = Learner(DataLoaders(dl, dl, device=device), model.to(device, dtype), nn.CrossEntropyLoss(), partial(SGD, mom=.9), lr=.1, cbs=cbs)
    quiet(learn).remove_cb(learn.recorder)   # it takes float32 losses
    return learn

def weights(learn): return nn.utils.parameters_to_vector(learn.model.parameters()).detach().double()

def trained(*args):
    "The weights after two epochs"
    learn = small_learner(*args)
    was = weights(learn)
    torch.manual_seed(1)
    with redirect_stdout(io.StringIO()): learn.fit(2)
    assert (weights(learn)-was).norm()>.02*was.norm(), 'nothing was learned'
    return weights(learn)

def half_on(device):
    "fastai's `MixedPrecision` names one kind of device"
    return replaced.multiple(fp16, autocast=lambda _,**kw: torch.autocast(device.type, **kw), GradScaler=lambda _,**kw: torch.amp.GradScaler(device.type, **kw))

def place(way, device):
    "How far `way` ends from the large batch in each place, and its memory"
    def run(device, is_half=False):
        "With `way`, and with the large batch"
        with half_on(device) if is_half else nullcontext(): return [trained(way, device, is_half, o) for o in (False,True)]
    def far(a, b): return ((a-b).norm()/b.norm()).item()
    cpu,double,half = run(torch.device('cpu')),run(device),run(device, True)
    (mem,_),(large,_) = (peaks(small_learner(way, device, False, o), device) for o in (False,True))
    res = dict(way=way, norm=way in whole, cpu=far(*cpu), device=far(*double), half=far(*half), rounding=far(half[1], double[1]), memory=mem/large)
    assert max(res['cpu'], res['device'])<=1e-12, res
    print(f"{way}: {res['cpu']:.0e}, {res['device']:.0e}, {res['half']:.0e} ({res['rounding']:.0e}), memory {res['memory']:.2f}", flush=True)
    return res

def show(res):
    print('\nThe peak of a training step and of pinned memory, in shares of the peak with the large batch\n')
    print(table([(r['net'], f"{r['images']} of {r['px']} pixels", f"{r['large']:.0f} MiB", r['way'], r['slice'], f"{r['memory']:.3f}", f"{r['pinned']:.2f}", f"{r['over_small']:.4f}" if 'over_small' in r else '') for r in res['rows']],
                ['network','images','large batch','way','slice','memory','pinned','over plain training in small batches']))
    print('\nThe peak of a training step and of pinned memory, in shares of the peak of the plain run\n')
    print(table([(r['net'], f"{r['step']:.0f} MiB", f"{r['parameters']:.0f} + {r['more']:.0f} MiB", f"{r['checkpointing']:.3f}", f"{r['offload']:.3f}") for r in res['architectures']],
                ['network','plain step','parameters + gradients and Adam','GradientCheckpointing','OffloadActivations']))
    print('\nWhat the sixth step of twelve blocks computes again, or moves there and back, in shares of the memory of the plain run\n')
    print(table([(o['share'] or 'room=0', *(f"{o[k]['again']} blocks, {o[k]['moved']/2**20:.1f} MiB, peak {o[k]['peak']:.2f}" for k in in_rooms)) for o in res['rooms']], ['memory', *in_rooms]))
    print(f'\nThe weights after two epochs against those of the large batch, in the same place: {N} images in batches of {LARGE}, or in slices of {SMALL}\n')
    print(table([(r['way'], 'yes' if r['norm'] else 'no', *(f'{r[k]:.0e}' for k in ('cpu','device','half','rounding')), f"{r['memory']:.2f}") for r in res['places']],
                ['way','batch norm and dropout','CPU, float64','accelerator, float64','accelerator, float16','the large batch, float16 for float64','memory']))

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--save', action='store_true'); p.add_argument('--only', nargs='*', default=()); args = p.parse_args()
    device,file = counted(),Path(__file__).parent/'results'/'memory.json'
    res = json.loads(file.read_text(encoding='utf-8')) if args.only and file.exists() else dict(rows=[], architectures=[], places=[], rooms=[])
    res.update(machine=f'{machine()}; counted by {by(device)}', by=by(device), simulated=is_simulated(device))
    print(res['machine'], flush=True)
    def wanted(o): return not args.only or o in args.only
    def keep(key, new, order):
        "Put `new` rows in place of those about the same network"
        names = {r['net'] for r in new}
        res[key] = sorted([*(r for r in res[key] if r['net'] not in names), *new], key=lambda r: list(order).index(r['net']))
        if args.save: save('memory', **res)
    if wanted('rooms'): res['rooms'] = list(what_stays(device))
    if wanted('places'): res['places'] = [place(way, device) for way in {**plain, **slices, **whole} if way!='exact, half']
    for net in nets:
        if wanted(net): keep('rows', list(shares(net, device)), nets)
    for net in checkpointing.nets:
        if wanted(net): keep('architectures', [architecture(net, device)], checkpointing.nets)
    if args.save: save('memory', **res)
    show(res)
