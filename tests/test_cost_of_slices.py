"""What slices pay once in a fit and not in each batch, and what they share on the host."""
from collections import Counter
from harness import *
from fastai_accum.all import *
from fastai_accum import microbatch
from fastai_accum.proof.dry import Dry
from fastai_accum.exact.lockstep import _stats
from fastai_accum.memory.offload import Slab

def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6,5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(.3), nn.Linear(5,3)).double()

@pytest.mark.parametrize('kw', [dict(coupled=True), dict(exact=True)], ids=str)
def test_once_a_fit(kw, monkeypatch, capsys):
    "The plan, two dry runs, are made once, for both epochs and for all batches of one shape"
    n = Counter()
    def count(o, k):
        f = getattr(o, k)
        def counted(*args, **more): n[k] += 1; return f(*args, **more)
        monkeypatch.setattr(o, k, counted)
    learn = make_learner(make_dls(64, 16), nn.Sequential(nn.Linear(6,3)).double() if 'coupled' in kw else normed(),
                         cbs=MicroBatch(4, valid=False, prove=False, **kw), splitter=trainable_params)
    count(Dry, 'run')
    learn.fit(2)
    assert n['run']==(2 if 'exact' in kw else 0), n

class Late(nn.Module):
    "Changes something from its fifth batch on: what it counts goes into what it returns"
    def __init__(self):
        super().__init__()
        self.seen,self.lin = [],nn.Linear(6,3)
    def forward(self, x):
        if self.training and at[0]>=5: self.seen = [*self.seen,1]
        return self.lin(x)*(1+len(self.seen))
at = [0]

class Counts(Callback):
    run_valid = False
    def before_batch(self): at[0] += 1

def test_what_changes_late_goes_from_slice_to_slice():
    "The batch runs once more, with all that can change"
    def train(*cbs):
        at[0] = 0
        torch.manual_seed(0)
        learn = make_learner(make_dls(64, 8), Late().double(), cbs=[Counts(),*cbs], splitter=trainable_params)
        learn.fit(2, .01)
        return learn
    a,b = train(MicroBatch(3, coupled=True, prove=False)),train()
    assert_same(a, b)
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
