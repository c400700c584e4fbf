"""What needs a real GPU, in parts that take a quarter of an hour together.

    python benchmarks/gpu.py                       # each part in its limit; what it finds goes to benchmarks/results/gpu.json, which the docs show
    python benchmarks/gpu.py --only limits rooms   # these parts again
    python benchmarks/gpu.py --dry                 # all parts on the simulated accelerator, with tiny sizes, to see that they run; nothing is written

A part runs in a process of its own. If it fails, or its time is over, what it has found until then is kept, and the next one begins.

Time is that of a step: the median of an epoch, without what is done once in a fit or an epoch. Memory is the peak that the allocator has counted, with weights, gradients and the state of the optimizer: what the
card shows. RAM is the pinned memory of the host. Batches are on the GPU before the training begins, so no loader is measured."""
import argparse,contextlib,os,re,signal,subprocess,tempfile,threading
from collections import Counter
from unittest.mock import patch as replaced
from memory import *
from what_fits import Transformer

minutes = dict(tests=3, costs=4, exact=1, limits=3, rooms=2, profile=2)
parser = argparse.ArgumentParser()
parser.add_argument('--dry', action='store_true')
parser.add_argument('--part', choices=minutes)   # what the process of a part gets
parser.add_argument('--only', nargs='*', choices=minutes, default=[*minutes])
args = parser.parse_args()
here,GB = Path(__file__).parent,2**30
there = torch.device('cuda', 0)   # a part may replace it by the simulated one

def images(n, px): return torch.randn(n,3,px,px, device=there),torch.randint(10, (n,), device=there)
def tokens(n, length): return torch.randint(5000, (n,length), device=there),torch.randint(10, (n,), device=there)
def resnet(arch): return lambda: create_vision_model(arch, 10, pretrained=False)
def encoder(d, length, n_layer, heads): return partial(Transformer, d, length, n_layer, heads)
# the model, a batch of n samples, and n for the tables
nets = {'ResNet-50, 64 images of 224 pixels':(resnet(resnet50), partial(images, px=224), 64),
        'a transformer with 12 layers of 768, 32 texts of 512 tokens':(encoder(768, 512, 12, 12), partial(tokens, length=512), 32),
        'a transformer with 4 layers of 256, 64 texts of 256 tokens':(encoder(256, 256, 4, 4), partial(tokens, length=256), 64)}
if args.dry: nets = {'blocks':(partial(blocks, 3, 4), partial(images, px=8), 8), 'transformer':(encoder(16, 16, 2, 2), partial(tokens, length=16), 8)}
resnet_50,*_,small = nets
ways = {'the large batch':lambda bs: [], 'GradientCheckpointing':lambda bs: [GradientCheckpointing(room=0)], 'OffloadActivations':lambda bs: [OffloadActivations(room=0)],
        'GradientCheckpointing + OffloadActivations':lambda bs: [GradientCheckpointing(room=0), OffloadActivations(room=0)],
        'GradientCheckpointing, what fits stays':lambda bs: [GradientCheckpointing()], 'OffloadActivations, what fits stays':lambda bs: [OffloadActivations()],
        'AccumulateStep':lambda bs: [AccumulateStep(n_samples=64)], 'MicroBatch':lambda bs: [MicroBatch(bs)],
        'coupled=True':lambda bs: [MicroBatch(bs, coupled=True)], 'exact=True':lambda bs: [MicroBatch(bs, exact=True)]}
whole = [*ways][:6]   # nothing is cut

def learner(net, n, cbs=(), n_batches=4, half=False, opt_func=Adam):
    make,batch,_ = nets[net]
    torch.manual_seed(0)
    dls = DataLoaders(*[DataLoader([batch(n)]*n_batches, bs=None)]*2, device=there)
    learn = Learner(dls, make().to(there), nn.CrossEntropyLoss(), opt_func, lr=1e-4, cbs=[NoValid(), *cbs, Steps(), *([MixedPrecision('bf16')] if half else [])])
    return quiet(learn)

def fit(learn):
    out = io.StringIO()
    with redirect_stdout(out): learn.fit(1)
    return out.getvalue().strip()

class Steps(Callback):
    "Notes when each step is done"
    order,run_valid = 1000,False
    def before_train(self): self.ends = []
    def after_batch(self): self.ends.append(now())

def now():
    api(there).synchronize()
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
                with torch.autocast(there.type, torch.bfloat16, enabled=half): pred = model(xs)
                (loss_func(pred.float(), ys)*len(ys)/len(y)).backward()
            opt.step(); opt.zero_grad()
            ends.append(now())
        return ends
    return epoch

def peak(f):
    "The peaks of the memory that `f` takes on the card and, pinned, on the host, in GB"
    on = api(there)
    gc.collect(); on.empty_cache()
    if there.type=='cuda': torch._C._host_emptyCache()   # which has no public name
    on.reset_peak_memory_stats(); on.reset_peak_host_memory_stats()
    f(); on.synchronize()
    ram = on.host_memory_stats()
    return on.max_memory_allocated()/GB,ram.get('allocated_bytes.peak', ram['active_bytes.peak'] if 'active_bytes.peak' in ram else 0)/GB

# ---- the parts: each yields rows

def tests():
    "The tests that wait for a GPU, and those of devices and of memory, which run on the simulated accelerator elsewhere"
    names = 'on_a_device','memory','offload','checkpointing','exact','slices','untouched','look','proof','with_precision'
    runs = [['-k', 'on_a_gpu or check_on_a_device or synchronisation_inside'], [f'tests/test_{o}.py' for o in names]]
    if args.dry: runs = [['tests/test_offload.py', '-k', 'share_of_a_process']]
    for more in runs:
        command = [sys.executable, *'-m pytest -v -p no:cacheprovider --tb=short'.split(), *([] if args.dry else ['-n','12']), *more]
        with subprocess.Popen(command, cwd=here.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
            for line in p.stdout:
                print(line, end='', flush=True)
                if re.match(r'FAILED|ERROR|=.* (passed|failed)', line): yield dict(told=line.strip(' =\n'))

def costs():
    "What a step takes in each way, in time and memory"
    for net,half in zip(nets, (False,True)):
        base,n = None,nets[net][-1]
        def row(way, bs, epoch, **more):
            nonlocal base
            (mem,ram),step = peak(epoch),a_step(epoch())
            base = base or step
            return dict(net=net, half=half, n=n, way=way, bs=bs, step=step, time=step/base, memory=mem, ram=ram, **more)
        for way,cbs in ways.items():
            for bs in (n,) if way in whole else (n//2,n//8):
                is_small = way=='AccumulateStep'   # the loader has small batches
                learn = learner(net, *((bs,) if is_small else (n,)), cbs(bs) if not is_small else [AccumulateStep(n//bs)], 4*n//bs if is_small else 4, half)
                def epoch(): fit(learn); return learn.steps.ends
                start = now()
                try: told = fit(learn)
                except ValueError as e: print(f'{net}, {way} {bs}: refused: {e}'); break   # as dropout in fused attention
                yield row(way, bs, epoch, first=learn.steps.ends[0]-start, told=told)
                del learn
        for bs in (n//2,n//8):
            epoch = by_hand(net, n, bs, half); epoch()
            yield row('a loop by hand', bs, epoch)
            del epoch

def exact(px=16 if args.dry else 64):
    "How far the weights after two steps are from those of the whole batch, in float64"
    n = nets[resnet_50][-1]
    def weights(cbs):
        torch.manual_seed(0)
        batches = [(x.double(),y) for x,y in (images(n, px) for _ in range(2))]
        dls = DataLoaders(*[DataLoader(batches, bs=None)]*2, device=there)
        learn = quiet(Learner(dls, (blocks(2) if args.dry else resnet(resnet18)()).double().to(there), nn.CrossEntropyLoss(), lr=1e-3, cbs=[NoValid(),*cbs]))
        learn.remove_cb(learn.recorder)
        fit(learn)
        return torch.cat([o.flatten() for o in learn.model.state_dict().values() if o.is_floating_point()])
    torch.backends.cudnn.deterministic = True
    large = weights([])
    yield {way:float((weights(ways[way](n//8))-large).norm()/large.norm()) for way in ('exact=True','GradientCheckpointing','OffloadActivations')}

lines = {'':lambda: [], 'learn.gradient_checkpointing()':lambda: [GradientCheckpointing()], 'learn.offload_activations()':lambda: [OffloadActivations()],
         'learn.gradient_checkpointing().offload_activations()':lambda: [GradientCheckpointing(), OffloadActivations()], 'learn.micro_batch(32, exact=True)':lambda: [MicroBatch(4 if args.dry else 32, exact=True)]}

def limits(most=1024):
    "The largest batch that trains with each line on a smaller card, and its time for a sample"
    for card,net in itertools.product((.002,) if args.dry else (16,8), (resnet_50,small)):
        for line,cbs in lines.items():
            def seconds(n):
                "For a sample in a later step, or `None` if memory runs out"
                gc.collect(); api(there).empty_cache()
                try:
                    learn = learner(net, n, cbs())
                    fit(learn)
                    return (learn.steps.ends[-1]-learn.steps.ends[-2])/n
                except torch.OutOfMemoryError: return None
                except ValueError as e: print(f'{net}, {line}: refused: {e}')   # as draws in fused attention
            with held_to(int(card*GB), there):
                found,n,step = {},8,0
                while n<=(32 if args.dry else most) and (s := seconds(n)): found[n],n = s,2*n
                for step in (n//4,n//8):   # of what did not train
                    if not found or n>most: break
                    k = max(found)+step
                    if s := seconds(k): found[k] = s
            n = max(found, default=0)
            yield dict(card=card, net=net, line=line, n=n, seconds=found.get(n), is_most=n==most)

def rooms():
    "A step with room for a half and for all of what the plain run takes"
    n = nets[resnet_50][-1]
    def measured(limit, cbs):
        with held_to(limit and int(limit*GB), there):
            learn = learner(resnet_50, n, cbs, 8)
            try: mem,ram = peak(partial(fit, learn))
            except torch.OutOfMemoryError: return {}
            return dict(step=a_step(learn.steps.ends[3:]), memory=mem, ram=ram)
    plain = measured(None, [])
    yield dict(share=None, way='the large batch', **plain)
    for share,way in itertools.product((.5,.75,1.2), (GradientCheckpointing,OffloadActivations)):
        yield dict(share=share, way=way.__name__, **measured(share*plain['memory'], [way()]))

def profile(bs=8):
    "A step of `exact=True` in small slices: time of kernels and copies, and where Python is"
    learn = learner(resnet_50, nets[resnet_50][-1], [MicroBatch(2 if args.dry else bs, exact=True)])
    fit(learn); fit(learn)
    yield dict(step=a_step(learn.steps.ends))
    samples,done,own = Counter(),threading.Event(),threading.get_ident
    def watch():
        while not done.wait(.001):
            for k,frame in sys._current_frames().items():
                at = frame.f_code
                if k!=own(): samples[f'{Path(at.co_filename).name}:{at.co_name}'] += 1
    thread = threading.Thread(target=watch, daemon=True)
    thread.start(); fit(learn); done.set(); thread.join()
    n = sum(samples.values())
    for at,k in samples.most_common(25): yield dict(at=at, share=k/n)
    with torch.profiler.profile() as prof: fit(learn)
    times = Counter()
    for e in prof.events():
        if e.device_type!=torch.autograd.DeviceType.CPU: times[e.name if e.name.startswith('Mem') else 'kernels'] += e.time_range.elapsed_us()/1e6
    yield dict(epoch=learn.steps.ends[-1]-learn.steps.ends[0], n_steps=len(learn.steps.ends)-1, **times)

# ---- one part after another

def run_part(name):
    "The rows that the process of a part has written, and whether it has come to its end"
    with tempfile.TemporaryFile('w+') as out:
        p = subprocess.Popen([sys.executable, '-W', 'ignore', __file__, '--part', name, *['--dry']*args.dry], stdout=out, start_new_session=True)
        try: p.wait(60*minutes[name])
        except subprocess.TimeoutExpired: os.killpg(p.pid, signal.SIGKILL); p.wait(); print(f'{name}: {minutes[name]} minutes are over', flush=True)
        out.seek(0)
        text = out.read()
    print(text, flush=True)
    return [json.loads(o) for o in text.splitlines() if o.startswith('{"')],p.returncode==0

def main():
    if not args.dry and not torch.cuda.is_available(): sys.exit('This machine has no GPU; --dry runs all parts on the simulated accelerator')
    file,failed = here/'results'/'gpu.json',[]
    res = json.loads(file.read_text(encoding='utf-8')) if file.exists() else {}
    for name in args.only:
        print(f'\n{name}: {globals()[name].__doc__}', flush=True)
        start = time.time()
        rows,is_done = run_part(name)
        print(f'{time.time()-start:.0f} s', flush=True)
        if not is_done or not rows: failed.append(name)
        if not rows or args.dry: continue
        res |= {'machine':machine(), name:rows[0] if name=='exact' else rows}
        save('gpu', **res)   # what the next part does, this stays
    if failed: sys.exit(f"Not finished: {', '.join(failed)}")

if __name__=='__main__':
    if not args.part: main()
    else:
        if args.dry: there = counted()
        with half_on(there):
            for row in globals()[args.part](): print(json.dumps(row), flush=True)
