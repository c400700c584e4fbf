"""Everything that waits for a GPU: the tests, `what_fits`, memory that runs out, `exact=True` with its copies, the overlap of two processes, and every benchmark.

    python benchmarks/gpu.py          # what it would do, or with a GPU: all of it, about an hour; the figures go to benchmarks/results, where the pages read them
    python benchmarks/gpu.py --dry    # what it would do
"""
import argparse,json,os,statistics,subprocess,sys,warnings
from common import *
if __name__=='__main__': keep_memory()
warnings.filterwarnings('ignore')
from what_fits import *
import what_fits   # this folder's, whose names have one of the package among them
from fastai_accum.know.ways import as_text

here = Path(__file__).parent
share = .8   # of the memory of the device, which the learners may take
bert = partial(what_fits.transformer, n=512, d=768, n_layer=12, heads=12)
resnet = partial(what_fits.resnet, arch=resnet50, px=224)
def cuda(): return torch.device('cuda', 0)
def budget(): return int(share*torch.cuda.get_device_properties(cuda()).total_memory)

def too_large(make):
    "A batch size for `make` that takes 1.3 times the budget, from what 8 and 16 samples take"
    a,b = (learner(partial(make, bs=bs), cuda()).what_fits('1000GB').ways[0].peak for bs in (8,16))
    return int((1.3*budget()-a)/((b-a)/8))+8

def tables():
    "`what_fits` for a ResNet-50 and a transformer as large as BERT, whose batch does not fit"
    nets = {}
    for name,make in {'ResNet-50, images of 224 pixels':resnet, 'A transformer with 12 layers of 768, 512 tokens':bert}.items():
        bs = too_large(make)
        nets[f'{name}, batches of {bs}'] = partial(make, bs=bs)
    what_fits.measure(nets, cuda(), 'what_fits_gpu', True, budget())
    return {}

def out_of_memory():
    "`MicroBatch()` with batches that do not fit: the slice that it finds, and the peak of the next epoch"
    bs = too_large(resnet)
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        learn = learner(partial(resnet, bs=bs), cuda()).micro_batch()
        learn.fit(1, cbs=NoValid())
        found,peak = learn.micro_batches.fits[True],peak_bytes(partial(learn.fit, 1, cbs=NoValid()))
    finally: torch.cuda.set_per_process_memory_fraction(1.)
    assert found<bs and peak<=budget(), (found, bs, peak)
    return dict(bs=bs, slice=found, peak=peak, budget=budget())

def exact(bs=64, px=64):
    "The weights after two steps with `exact=True`, whose copies run on side streams, against those of the whole batch, in float64"
    def weights(line):
        learn = learner(partial(what_fits.resnet, arch=resnet18, bs=bs, px=px), cuda())
        learn.model.double()
        learn.dls.train.after_batch = lambda b: (b[0].double(),b[1])
        learn.remove_cb(learn.recorder)   # it takes float32 losses
        exec(line, dict(learn=learn))
        learn.fit(1, cbs=NoValid())
        return nn.utils.parameters_to_vector(learn.model.parameters()).detach()
    whole = weights('')
    lines = f'learn.micro_batch({bs//8}, exact=True)','learn.offload_activations()','learn.gradient_checkpointing()'
    far = {o:float((weights(o)-whole).norm()/whole.norm()) for o in lines}
    assert max(far.values())<1e-9, far
    return far

def overlap():
    "Seconds of a window in two processes over NCCL, for fastai's callback and for ours"
    if torch.cuda.device_count()<2: return 'not measured: it takes two devices'
    out = here/'results'/'overlap.json'
    torch.multiprocessing.spawn(_process, (out,), nprocs=2)
    res = json.loads(out.read_text()); out.unlink()
    return res

def _process(rank, out):
    import distributed as d
    os.environ.update(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='localhost', MASTER_PORT='29511')
    torch.cuda.set_device(rank)
    d.dist.init_process_group('nccl')
    net = d.net
    d.net = lambda: net().cuda()
    secs = {n:d.measure(n, 12)[0] for n in d.STEPS}
    if not rank: out.write_text(json.dumps({n:[statistics.median(o) for o in s] for n,s in secs.items()}))
    d.dist.destroy_process_group()

commands = [['-m','pytest','-n','0','-q',str(here.parent/'tests'),'-k','gpu or synchronisation_inside'],
            *([str(here/f'{o}.py'),'--save'] for o in ('overhead','microbatch','memory','wholebatch','checkpointing','noise'))]
functions = out_of_memory,exact,overlap,tables

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--dry', action='store_true'); args = p.parse_args()
    found = torch.cuda.is_available()
    print(torch.cuda.get_device_name() if found else 'This machine has no GPU. On one that has, this would run:', flush=True)
    failed,res = [],{}
    for f in functions:
        print(f'\n{f.__name__}: {f.__doc__}', flush=True)
        if not found or args.dry: continue
        try: res[f.__name__] = f(); print(res[f.__name__])
        except Exception as e: failed.append(f.__name__); print(f'failed: {type(e).__name__}: {e}')   # the others go on
        torch.cuda.empty_cache()
    if res: save('gpu', device=torch.cuda.get_device_name(), **res)
    for c in commands:
        print('\n'+' '.join(['python',*(str(Path(o).relative_to(here.parent)) if os.path.isabs(o) else o for o in c)]), flush=True)
        if found and not args.dry and subprocess.run([sys.executable,*c], cwd=here.parent).returncode: failed.append(c[0])
    if failed: sys.exit(f"Failed: {', '.join(failed)}")
