"""What the package itself costs in time, what small batches cost without it, and what accumulation gains with Adam.

    OMP_NUM_THREADS=1 python benchmarks/cost.py            # print the tables, about fifteen minutes
    OMP_NUM_THREADS=1 python benchmarks/cost.py --save     # and write them to benchmarks/results/cost.json
    OMP_NUM_THREADS=1 python benchmarks/cost.py --calls    # only count calls of Python, in a few seconds

A way is compared with a loop written by hand over the same batches: slices of 8 for those that cut, the large batch for the others.
The proof and the look, which come once in a fit, are left out: benchmarks/proof.py measures them. On a GPU that waits for Python, calls of Python are the time: `calls` counts those of one step, which
are the same on each machine."""
import argparse,gc,sys,threading,time,warnings
from functools import partial
from wholebatch import *
if __name__=='__main__': keep_memory()
warnings.filterwarnings('ignore')
from torch.utils.checkpoint import checkpoint
from torchvision.models.resnet import Bottleneck,ResNet

NET,PX,PAIRS = *README,7
nets['ResNet-34'] = resnet(resnet34)

def by_hand(bs):
    "A step of a plain loop over the batch in slices of `bs`, with the optimizer of the learner"
    learn = learner(NET, PX, 'the large batch')
    model,opt,loss_func = learn.model.train(),learn.opt,learn.loss_func
    x,y = learn.dls.train.one_batch()
    def step():
        for xs,ys in zip(x.split(bs), y.split(bs)): (loss_func(model(xs), ys)*len(ys)/len(y)).backward()
        opt.step(); opt.zero_grad()
    step()
    return step

def accumulated():
    "A learner whose loader gives the slices, with an `AccumulateStep`"
    learn = learner(NET, PX, 'the large batch')
    x,y = learn.dls.train.one_batch()
    dl = DataLoader(list(zip(x.split(SLICE), y.split(SLICE))), bs=None)
    learn.dls = DataLoaders(dl, dl, device=default_device())
    learn.add_cb(AccumulateStep(BS//SLICE)).fit(1)
    return learn

def seconds(f):
    "Seconds that `f` takes: on a CPU those of the processor, since other programs may run beside"
    if torch.accelerator.is_available(): return clock(f)
    gc.collect()
    t = time.process_time(); f()
    return time.process_time()-t

def ratio(a, b, pairs): return dict(zip(('time','pm'), paired(partial(seconds, a), partial(seconds, b), pairs)))

def package(pairs):
    "Each way, over a loop by hand"
    rows,loops = [],{bs:by_hand(bs) for bs in (SLICE,BS)}
    made = dict(AccumulateStep=accumulated, **{w:partial(learner, NET, PX, w) for w in list(ways)[1:]})
    for way,make in made.items():
        bs = BS if way in ('GradientCheckpointing','OffloadActivations') else SLICE
        learn = make()
        for cb in learn.cbs.filter(risinstance(MicroBatch)): cb.prove = False   # else each fit, here of one step, begins with a look
        rows.append(dict(way=way, bs=bs, **ratio(partial(learn.fit, 1), loops[bs], pairs)))
        print(f"{way}: {rows[-1]['time']:.3f} ± {rows[-1]['pm']:.3f}", flush=True)
    return rows

class First(Callback):
    "Milliseconds from `before_batch` to the first layer: of the processor, if that is what trains"
    run_valid = False
    def __init__(self): self.ms,self.start = [],None
    def before_fit(self): self.hook = first(m for m in self.model.modules() if not list(m.children())).register_forward_pre_hook(self.at)
    def before_batch(self): self.start = self.now()
    def now(self): return 1e3*(time.perf_counter() if torch.accelerator.is_available() else time.process_time())
    def at(self, *_):
        if self.start is not None: self.ms.append(self.now()-self.start)
        self.start = None
    def after_fit(self): self.hook.remove()

def before_the_first_layer(net='ResNet-34', bs=16, n=8):
    "Of each way, the median over the batches of a fit, after the first one"
    rows = []
    for way in ('MicroBatch','coupled','exact'):
        learn,cb = learner(net, 32, way),First()
        x,y = learn.dls.train.one_batch()
        dl = DataLoader([(x[:bs],y[:bs])]*n, bs=None)
        learn.dls = DataLoaders(dl, dl, device=default_device())
        learn.fit(1); learn.add_cb(cb); learn.fit(1)
        rows.append(dict(way=way, ms=sorted(cb.ms[1:])[n//2]))
    return rows

def small_batches(pairs):
    "A loop by hand over slices, over one with the large batch"
    whole = by_hand(BS)
    return [dict(bs=bs, **ratio(by_hand(bs), whole, pairs)) for bs in (8,16)]

def gained(pairs, bs=4, n_step=8, n=32):
    "An epoch with `AccumulateStep`, over one with a step after each batch, with Adam"
    def fit(*cbs):
        torch.manual_seed(0)
        device = default_device()
        batches = [(torch.randn(bs,3,PX,PX).to(device), torch.randint(10, (bs,)).to(device)) for _ in range(n)]
        dls = DataLoaders(*[DataLoader(batches, bs=None)]*2, device=device)
        learn = Learner(dls, create_vision_model(resnet18, 10, pretrained=False).to(device), nn.CrossEntropyLoss(), cbs=[NoValid(),*cbs])
        learn.remove_cb(ProgressCallback); learn.logger = noop
        learn.fit(1)
        return partial(learn.fit, 1)
    return dict(bs=bs, n_step=n_step, **ratio(fit(AccumulateStep(n_step)), fit(), pairs))

def count_calls(run):
    "Calls of functions of Python from the second `mark()` of `run(mark)` to the third"
    n,at = 0,[]
    def note(frame, event, arg):
        nonlocal n
        n += event=='call'
    for o in threading,sys: o.setprofile(note)
    try: run(lambda *_: at.append(n))
    finally:
        for o in sys,threading: o.setprofile(None)
    return at[2]-at[1]

def narrow():
    torch.manual_seed(0)
    return ResNet(Bottleneck, [3,4,6,3], num_classes=10, width_per_group=8)

def loop(learn, mark, n_slices=1, n_batches=1, coupled=False):
    "A step for each `n_batches` batches of the loader, of which each is cut into `n_slices`; `coupled` runs each slice twice"
    model,opt,loss_func,dl = learn.model.train(),learn.opt,learn.loss_func,learn.dls.train
    k = n_slices*n_batches
    def slices(x): return x.chunk(n_slices) if n_slices>1 else (x,)
    for i,(x,y) in enumerate(dl):
        if coupled:
            with torch.no_grad(): pred = torch.cat([model(xs) for xs in slices(x)])
            g, = torch.autograd.grad(loss_func(pred.requires_grad_(), y), pred)
            for xs,gs in zip(slices(x), slices(g)): model(xs).backward(gs)
        else:
            for xs,ys in zip(slices(x), slices(y)): (loss_func(model(xs), ys)/k).backward()
        if (i+1)%n_batches==0: opt.step(); opt.zero_grad(); mark()

def calls(bs=8, px=16, n_slices=4):
    "Calls of Python in one step of each way, and of the same by hand: a narrow ResNet-50, `bs` images of `px` pixels"
    def make(k, *cbs):
        batches = [(torch.randn(bs//k,3,px,px), torch.randint(10, (bs//k,))) for _ in range(3*k)]
        learn = Learner(DataLoaders(*[DataLoader(batches, bs=None)]*2), narrow(), nn.CrossEntropyLoss(), partial(SGD, mom=.9), lr=1e-3, cbs=[NoValid(),*cbs])
        learn.remove_cb(ProgressCallback); learn.logger = noop
        return learn
    def ours(k, cb):
        def run(mark):
            with contextlib.redirect_stdout(io.StringIO()): make(k, *L(cb), Callback(after_step=mark)).fit(1)
        return count_calls(run)
    def hand(k=1, blocks=False, **kwargs):
        learn = make(k)
        learn.create_opt()
        for m in filter(risinstance(Bottleneck), learn.model.modules() if blocks else ()): m.forward = partial(checkpoint, m.forward, use_reentrant=False)
        return count_calls(lambda mark: loop(learn, mark, n_batches=k, **kwargs))
    plain,windows,cut,again,twice = hand(),hand(n_slices),hand(n_slices=n_slices),hand(blocks=True),hand(n_slices=n_slices, coupled=True)
    rows = [('no callback', 1, None, plain), (f'AccumulateStep({n_slices})', n_slices, AccumulateStep(n_slices), windows),
            (f'MicroBatch({bs//n_slices})', 1, MicroBatch(bs//n_slices), cut), ('GradientCheckpointing()', 1, GradientCheckpointing(), again),
            (f'MicroBatch({bs//n_slices}, coupled=True)', 1, MicroBatch(bs//n_slices, coupled=True), twice),
            (f'MicroBatch({bs//n_slices}, exact=True)', 1, MicroBatch(bs//n_slices, exact=True), twice)]
    return [dict(way=way, calls=n, by_hand=by_hand, ratio=n/by_hand) for way,k,cb,by_hand in rows for n in [ours(k, cb)]]

def print_calls(rows):
    print('\ncalls of Python in a step: a narrow ResNet-50, 8 images, four slices where it is cut; coupled and exact over four slices by hand that run twice\n')
    print(table([(r['way'], f"{r['calls']:,}", f"{r['by_hand']:,}", f"{r['ratio']:.2f}") for r in rows], ['way','calls','by hand','times']))

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--calls', action='store_true'); p.add_argument('--pairs', type=int, default=PAIRS); p.add_argument('--save', action='store_true'); args = p.parse_args()
    print(machine(), f'{torch.get_num_threads()} thread(s)')
    counted = calls()
    print_calls(counted)
    if args.calls: raise SystemExit
    res = dict(calls=counted, pairs=args.pairs, threads=torch.get_num_threads(), first=before_the_first_layer(), rows=package(args.pairs), small=small_batches(args.pairs), gained=gained(args.pairs))
    def figures(r): return f"{r['time']:.2f} ± {r['pm']:.2f}"
    print(f'\n{NET}, {BS} images of {PX} pixels, over a loop by hand over the same batches\n')
    print(table([(r['way'], r['bs'], figures(r)) for r in res['rows']], ['way','batches of','time']))
    print('milliseconds before the first layer of a ResNet-34:', ', '.join(f"{r['way']} {r['ms']:.1f}" for r in res['first']))
    for r in res['small']: print(f"a loop by hand over batches of {r['bs']}, over the large batch: {figures(r)}")
    print(f"AccumulateStep({res['gained']['n_step']}) with Adam, ResNet-18, batches of {res['gained']['bs']}, over a step a batch: {figures(res['gained'])}")
    if args.save: save('cost', batch=BS, **res)
