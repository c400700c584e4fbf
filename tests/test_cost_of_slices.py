"""What slices pay once in a fit and not in each batch, and what they share on the host."""
from unittest import mock
from nets import *
from fastai_accum.all import *
from fastai_accum.proof.dry import Dry
from fastai_accum.exact.lockstep import _stats
from fastai_accum.memory.offload import Slab

@each(kw=[dict(coupled=True), dict(exact=True)])
def test_once_a_fit(kw):
    "The plan, two dry runs, are made once, for both epochs and for all batches of one shape"
    runs,run,norm = [],Dry.run,nn.BatchNorm1d if 'exact' in kw else nn.Identity
    cb = MicroBatch(4, valid=False, prove=False, **kw)
    learn = make_learner(make_dls(64, 16), layers(norm(5)), cbs=cb, **one_group)
    with mock.patch.object(Dry, 'run', lambda *args, **more: runs.append(1) or run(*args, **more)): learn.fit(2)
    assert len(runs)==(2 if 'exact' in kw else 0)

at = [0]   # the batches so far, which no model holds
def count(cb): at[0] += cb.training
def late():
    "Changes something from its fifth batch on: what it counts goes into what it returns"
    def f(m, x):
        if m.training and at[0]>=5: m.seen = [*m.seen,1]
        return m.lin(x)*(1+len(m.seen))
    at[0] = 0
    torch.manual_seed(0)
    return Made(f, seen=[], lin=nn.Linear(6,3).double())

def test_what_changes_late_goes_from_slice_to_slice():
    "The batch runs once more, with all that can change"
    a,b = same(lambda: MicroBatch(3, coupled=True, prove=False), 8, 8, 64, lambda l: l.fit(2, .01), model=late,
               also=partial(Callback, before_batch=count), shuffle=True, **one_group)
    assert len(a.model.seen)==len(b.model.seen)==12

@each(shape=[(6,4), (6,4,5,3), (3,2,2,2,2)], dtype=[torch.float64,torch.float32])
def test_statistics(shape, dtype):
    tol = 1e-14 if dtype==torch.float64 else 1e-6
    x = torch.randn(shape, dtype=torch.float64)*.1+10
    dims = [0,*range(2,len(shape))]
    mean,var = _stats(x.to(dtype))
    assert rel(mean.double(), x.mean(dims))[0]<tol
    assert rel(var.double(), x.to(dtype).double().var(dims, correction=0))[0]<10*tol
    assert not any(o.any() for o in _stats(x[:0]))

def test_a_slab():
    "Tensors have parts of their own, with the strides that a copy has, and hold the memory together"
    slab = Slab(2**12, False)
    x = torch.randn(4,5,6)
    given = [x, x>0, x.transpose(0,2), x.double()[:,::2], x[:1].bfloat16()]
    made = [slab.like(o).copy_(o) for o in given]
    for a,b in zip(made, given): assert torch.equal(a, b) and a.stride()==torch.empty_like(b).stride()
    assert len({o.untyped_storage().data_ptr() for o in made})==1
    assert slab.left==2**12-sum(-(-o.nbytes//64)*64 for o in given)
