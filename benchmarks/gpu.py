"""What needs a real GPU: how exact each way is there, what it takes in time and memory, memory that really runs out, and the tests.

    python benchmarks/gpu.py           # about five minutes; without a GPU, it says what it would do
    python benchmarks/gpu.py --save    # and write the figures to benchmarks/results/gpu.json, which the docs show

Time is that of a step, over that of the large batch: the median of an epoch, without what is done once in a fit or an epoch. Memory is the peak that the allocator has counted, with weights, gradients and the state of the optimizer: what the
card shows. RAM is the pinned memory of the host. Batches are on the GPU before the training begins, so no loader is measured."""
import argparse,contextlib,gc,io,subprocess,sys,time,traceback,warnings
from functools import partial
from common import *
warnings.filterwarnings('ignore')
from fastai.vision.all import *
from fastai.callback.progress import ProgressCallback
from fastai_accum.all import *
from what_fits import Transformer

here,GB,CARD = Path(__file__).parent,2**30,8   # the gigabytes to which the allocator is held where memory runs out
def device(): return torch.device('cuda', 0)

def images(n, px): return torch.randn(n,3,px,px, device=device()),torch.randint(10, (n,), device=device())
def tokens(n, length): return torch.randint(5000, (n,length), device=device()),torch.randint(10, (n,), device=device())
def resnet(arch): return lambda: create_vision_model(arch, 10, pretrained=False)
def bert(): return Transformer(768, 512, 12, 12)
# the model, a batch of n samples, and n for the tables
nets = {'ResNet-50, 64 images of 224 pixels':(resnet(resnet50), partial(images, px=224), 64),
        'a transformer with 12 layers of 768, 32 texts of 512 tokens':(bert, partial(tokens, length=512), 32)}
ways = {'the large batch':lambda bs: [], 'GradientCheckpointing':lambda bs: [GradientCheckpointing(room=0)], 'OffloadActivations':lambda bs: [OffloadActivations(room=0)],
        'GradientCheckpointing + OffloadActivations':lambda bs: [GradientCheckpointing(room=0), OffloadActivations(room=0)], 'GradientCheckpointing, what fits stays':lambda bs: [GradientCheckpointing()],
        'MicroBatch':lambda bs: [MicroBatch(bs)], 'coupled=True':lambda bs: [MicroBatch(bs, coupled=True)], 'exact=True':lambda bs: [MicroBatch(bs, exact=True)]}
whole = 'the large batch','GradientCheckpointing','OffloadActivations','GradientCheckpointing + OffloadActivations','GradientCheckpointing, what fits stays'   # nothing is cut

def learner(net, n, cbs=(), n_batches=4, half=False):
    make,batch,_ = nets[net]
    torch.manual_seed(0)
    batches = [batch(n)]*n_batches
    dls = DataLoaders(*[DataLoader(batches, bs=None)]*2, device=device())
    learn = Learner(dls, make().to(device()), nn.CrossEntropyLoss(), lr=1e-4, cbs=[NoValid(), *cbs, *([MixedPrecision('bf16')] if half else [])])
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

def fit(learn, n=1):
    out = io.StringIO()
    with contextlib.redirect_stdout(out): learn.fit(n)
    return out.getvalue()

class Steps(Callback):
    "Notes when each step is done"
    order,run_valid = 1000,False
    def before_train(self): self.ends = []
    def after_batch(self): self.ends.append(now())

def now():
    torch.cuda.synchronize()
    return time.perf_counter()

def a_step(ends): return statistics.median(b-a for a,b in zip(ends, ends[1:]))   # without what is done once in an epoch

def by_hand(net, n, bs, half):
    "A plain loop over batches in slices of `bs`; returns when each step is done"
    learn = learner(net, n, half=half)
    learn.create_opt()
    model,opt,loss_func = learn.model.train(),learn.opt,learn.loss_func
    def epoch():
        ends = []
        for x,y in learn.dls.train:
            for xs,ys in zip(x.split(bs), y.split(bs)):
                with torch.autocast('cuda', torch.bfloat16, enabled=half): pred = model(xs)
                (loss_func(pred.float(), ys)*len(ys)/len(y)).backward()
            opt.step(); opt.zero_grad()
            ends.append(now())
        return ends
    return epoch

@contextlib.contextmanager
def held_to(n_bytes):
    "A block in which the allocator gives no more than `n_bytes`"
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(n_bytes/torch.cuda.get_device_properties(0).total_memory)
    try: yield
    finally: torch.cuda.set_per_process_memory_fraction(1.); torch.cuda.empty_cache()

def peak(f):
    "The peaks of the memory that `f` takes on the card and, pinned, on the host"
    gc.collect(); torch.cuda.empty_cache(); torch._C._host_emptyCache()   # which has no public name
    torch.cuda.reset_peak_memory_stats(); torch.cuda.reset_peak_host_memory_stats()
    f(); torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(),torch.cuda.host_memory_stats()['allocated_bytes.peak']

def costs():
    "What a step takes in each way, in time and memory"
    rows = []
    for net,half in zip(nets, (False,True)):
        n = nets[net][-1]
        def note(way, bs, epoch, told='', first=0.):
            (mem,ram),step = peak(epoch),a_step(epoch())
            rows.append(dict(net=net, half=half, n=n, way=way, bs=bs, step=step, memory=mem/GB, ram=ram/GB, first=first, told=told.strip()))
            r = rows[-1]
            print(f"{net}, {'bf16' if half else 'float32'}, {way} {bs}: {step:.4f} s, {r['memory']:.2f} GB, RAM {r['ram']:.2f} GB, first {first:.1f} s", flush=True)
        for way,cbs in ways.items():
            for bs in (n,) if way in whole else (n//2,n//8):
                learn = learner(net, n, [*cbs(bs), Steps()], half=half)
                def epoch(): fit(learn); return learn.steps.ends
                start = now()
                try: told = fit(learn)
                except ValueError as e: print(f'{net}, {way} {bs}: refused: {e}'); break   # as dropout in fused attention
                first = learn.steps.ends[0]-start
                note(way, bs, epoch, told, first)
                del learn
        for bs in (n//2,n//8):
            epoch = by_hand(net, n, bs, half); epoch()
            note('a loop by hand', bs, epoch)
            del epoch
    base = {net:next(r['step'] for r in rows if r['net']==net) for net in nets}
    for r in rows: r['time'] = r['step']/base[r['net']]
    return rows

def out_of_memory():
    "`MicroBatch()` with batches that do not fit: the slice that it finds, and the peak afterwards"
    rows,net = [],'ResNet-50, 64 images of 224 pixels'
    for kw,n in (({},256), (dict(exact=True),256), (dict(coupled=True),256)):
        with held_to(CARD*GB):
            try: fit(learner(net, n, n_batches=1)); raise AssertionError('the batch fits')
            except torch.OutOfMemoryError: pass
            gc.collect()
            learn = learner(net, n, [MicroBatch(**kw)], n_batches=1)
            told = fit(learn)
            found,(mem,ram) = learn.micro_batches.fits[True],peak(partial(fit, learn))
        assert found<n and mem<=CARD*GB, (found, n, mem)
        rows.append(dict(net=net, kw=str(kw), n=n, slice=found, memory=mem/GB, ram=ram/GB, card=CARD, told=told.strip()))
        print(rows[-1], flush=True)
        del learn
    return rows

def exact(n=64, px=64):
    "The weights after two steps in each way against those of the whole batch, in float64"
    def weights(cbs):
        torch.manual_seed(0)
        batches = [(x.double(),y) for x,y in (images(n, px) for _ in range(2))]
        dls = DataLoaders(*[DataLoader(batches, bs=None)]*2, device=device())
        learn = Learner(dls, resnet(resnet18)().double().to(device()), nn.CrossEntropyLoss(), lr=1e-3, cbs=[NoValid(),*cbs])
        learn.remove_cbs([ProgressCallback,learn.recorder]); learn.logger = noop
        fit(learn)
        return torch.cat([o.flatten() for o in learn.model.state_dict().values() if o.is_floating_point()])
    was,torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic,True
    try:
        whole = weights([])
        far = {way:float((weights(ways[way](n//8))-whole).norm()/whole.norm()) for way in ('exact=True','GradientCheckpointing','OffloadActivations')}
    finally: torch.backends.cudnn.deterministic = was
    assert far['exact=True']<1e-9 and far['GradientCheckpointing']==far['OffloadActivations']==0, far
    return far

def fits():
    "What `what_fits` says with a budget of a small card, and what the line then takes"
    rows = []
    for net,(_,_,n) in nets.items():
        n *= 4
        learn = learner(net, n)
        found = learn.what_fits(f'{CARD-2}GB')
        print(found, flush=True)
        del learn; gc.collect()
        with held_to(CARD*GB):
            pasted = learner(net, n)
            exec(found.best.line, dict(learn=pasted))
            mem,_ = peak(partial(fit, pasted))
        rows.append(dict(net=net, n=n, title=found.title, line=found.best.line, said=found.best.peak/GB, pasted=mem/GB))
        print(rows[-1], flush=True)
        del pasted; gc.collect()
    return rows

def tests():
    "The tests of devices and of memory, which run on the simulated accelerator elsewhere, and those that wait for a GPU"
    files = [str(here.parent/'tests'/f'test_{o}.py') for o in ('on_a_device','exact','memory','offload','untouched','look','proof','slices','with_precision','checkpointing')]
    runs = [*files],[str(here.parent/'tests'),'-k','on_a_gpu or check_on_a_device or synchronisation_inside']
    lines = []
    for args in runs:
        res = subprocess.run([sys.executable,'-m','pytest','-q','-n','8','-p','no:cacheprovider','-rfs','--tb=short',*args], cwd=here.parent, capture_output=True, text=True)
        lines.append(res.stdout.strip().splitlines()[-1])
        if res.returncode: raise AssertionError(f'tests have failed:\n{res.stdout[-6000:]}')
    return lines

functions = exact,costs,out_of_memory,fits,tests

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--save', action='store_true'); p.add_argument('--only', nargs='*', default=()); args = p.parse_args()
    found = torch.cuda.is_available()
    print(machine() if found else 'This machine has no GPU. On one that has, this would run:', flush=True)
    failed,res = [],{}
    for f in functions:
        if args.only and f.__name__ not in args.only: continue
        print(f'\n{f.__name__}: {f.__doc__}', flush=True)
        if not found: continue
        start = time.time()
        try: res[f.__name__] = f(); print(res[f.__name__] if f is not costs else '')
        except Exception as e: failed.append(f.__name__); traceback.print_exc()   # the others go on
        print(f'{time.time()-start:.0f} s', flush=True)
        if args.save and res: save('gpu', **res)
        gc.collect(); torch.cuda.empty_cache()
    if failed: sys.exit(f"Failed: {', '.join(failed)}")
