"""How far 50 steps with `MicroBatch(8, exact=True)` are from those of the large batch, and how far the large batch is from itself if the
samples of each batch come in another order: both are rounding. Both are shares of how far the steps have moved the weights.

    OMP_NUM_THREADS=1 python benchmarks/drift.py --save    # three minutes; writes benchmarks/results/drift.json, which "What is exact and what is not" shows
"""
import argparse,contextlib,io,warnings
from common import *
if __name__=='__main__': keep_memory()
warnings.filterwarnings('ignore')
from fastai.vision.all import *
from fastai_accum.all import *

BS,SLICE,STEPS,PX = 32,8,50,32
dtypes = dict(float32=torch.float32, bfloat16=torch.bfloat16)

def weights_after(dtype, seed, cb=None, order=None):
    "The weights of a small ResNet before and after the steps; `order` shuffles the samples of each batch"
    g = torch.Generator().manual_seed(seed)
    shift = torch.randn(10, 3, PX, PX, generator=g)
    batches = []
    for _ in range(STEPS):
        y = torch.randint(10, (BS,), generator=g)
        x = shift[y]+torch.randn(BS, 3, PX, PX, generator=g)
        at = torch.randperm(BS, generator=torch.Generator().manual_seed(order)) if order else torch.arange(BS)
        batches.append((x[at].to(dtype), y[at]))
    torch.manual_seed(seed)
    kw = dict(stride=2, act_cls=Mish)   # a ReLU turns a rounding near 0 into a jump
    model = nn.Sequential(ConvLayer(3, 16, **kw), ResBlock(1, 16, 32, **kw), ResBlock(1, 32, 64, **kw),
                          nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(64, 10)).to(dtype)
    def weights(): return nn.utils.parameters_to_vector(model.parameters()).double().detach()
    start = weights()
    dls = DataLoaders(*[DataLoader(batches, bs=None)]*2, device='cpu')
    learn = Learner(dls, model, nn.CrossEntropyLoss(), opt_func=partial(SGD, mom=.9), lr=1e-2, default_cbs=False, cbs=[TrainEvalCallback, NoValid, *L(cb)])
    with contextlib.redirect_stdout(io.StringIO()): learn.fit(1)
    return start,weights()

def measure(seeds=3):
    "For each precision, the relative differences of `exact=True` and of another order"
    rows = []
    for name,dtype in dtypes.items():
        for seed in range(seeds):
            start,large = weights_after(dtype, seed)
            def off(**kw): return float((weights_after(dtype, seed, **kw)[1]-large).norm()/(large-start).norm())
            rows.append(dict(dtype=name, seed=seed, exact=off(cb=MicroBatch(SLICE, exact=True)), order=off(order=1)))
            print(rows[-1], flush=True)
    return rows

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--save', action='store_true'); args = p.parse_args()
    rows = measure()
    if args.save: save('drift', steps=STEPS, batch=BS, slice=SLICE, rows=rows)
