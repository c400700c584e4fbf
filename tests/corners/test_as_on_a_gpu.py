"What PyTorch does in another way on a GPU, done on the CPU: no GPU is needed"
from contextlib import suppress
from harness import *
from test_exact import X2,Y2,draws,same
from fastai_accum.exact.draws import Draw,batch_dims
from fastai_accum.devices import generator_of
from fastai_accum.know import prove as know_prove,trial as know_trial
from fastai_accum.know.trial import Middles,apart,in_double
from torch.utils._python_dispatch import TorchDispatchMode

@pytest.fixture
def dropouts():
    "Dropout as on a GPU: one operation, which scales too; counts the calls"
    calls = [0]
    def dropout(x, p, train):
        if not train or p==0 or not x.numel(): return x
        calls[0] += 1
        return torch.native_dropout(x, p, True)[0]
    lib = torch.library.Library('aten', 'IMPL')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')   # it takes the place of PyTorch's own
        for k in 'CPU','AutogradCPU': lib.impl('dropout', dropout, k)
    yield calls
    lib._destroy()

@pytest.mark.parametrize('k', 'dropout functional weight second attention scaled'.split())
def test_draws(k, dropouts):
    "Proved, though its probability is not that of a fair coin, and exact"
    same(draws[k], X2, Y2)
    assert dropouts[0]>10

def test_a_dropout_that_is_off_draws_nothing():
    "At p=0, the dropout of a GPU drops one number in thirty million"
    x,state = torch.randn(8, requires_grad=True),torch.get_rng_state()
    with Middles(): out,mask = torch.native_dropout(x, .3, True)
    assert torch.equal(out, x) and mask.all() and torch.equal(torch.get_rng_state(), state)

@pytest.mark.parametrize('name', ['flash','efficient','cudnn'])
def test_attention_with_a_dropout_of_its_own(name):
    "It is refused with the line that takes it apart, and then it is exact: see `scaled` in `test_draws`"
    op = getattr(torch.ops.aten, f'_scaled_dot_product_{name}_attention').default
    a,b = ([Draw(op, [(n,2,5,8)]*4, [()]*4, 'the Attention', None)] for n in (2,3))
    with pytest.raises(ValueError, match=r'the Attention draws with .*sdpa_kernel.*MATH'): batch_dims(a, b, 2, 3)

def test_unsteady_on_a_gpu_and_steady_on_the_cpu(monkeypatch):
    "It trains on the GPU, so nothing is proved there"
    def trial(*args, **kwargs):
        if devices.pop(): raise know_prove.Unsteady('the whole batch does not do the same twice')
        return know_prove.Proof(error=0.)
    devices = [False,True]
    monkeypatch.setattr(know_prove, 'prove', trial)
    learn = make_learner(make_dls(16, 8), cbs=MicroBatch(4, exact=True))
    with pytest.warns(UserWarning, match='was not tried.*does not do the same twice'): learn.fit(1)

def test_a_copy_is_made_where_it_is_needed():
    "On the host, if the device is short of memory; here the device is the CPU, and the host is `meta`"
    seen = []
    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.device.type=='cpu' and out.data_ptr()!=m.weight.data_ptr():
                seen.append(out.numel())
            return out
    m = nn.Linear(50, 50)
    with Made(): copy = in_double(m, 'meta')
    assert copy.weight.device.type=='meta' and copy.weight.dtype==torch.float64 and max(seen, default=0)<50*50

def test_a_trial_does_not_talk_to_other_processes(monkeypatch):
    "`SyncBatchNorm` wants a GPU if there are processes to talk to"
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    m,x = nn.SyncBatchNorm(6).double(),features(4)
    with pytest.raises(ValueError, match='to be on GPU'): m(x)
    with apart(m): assert torch.equal(in_double(m, 'cpu')(x), F.batch_norm(x, None, None, training=True))
    assert torch.distributed.is_initialized()

@pytest.mark.parametrize('device', ['cuda','cuda:0'])
def test_generators_before_the_gpu_is_used(device, monkeypatch):
    "PyTorch makes them when CUDA begins, such as for a learner that has not trained yet"
    g = torch.Generator()
    def begin(): monkeypatch.setattr(torch.cuda, 'default_generators', (g,)); return 0
    monkeypatch.setattr(torch.cuda, 'current_device', begin)
    assert generator_of(device) is g

def test_what_moves_becomes_float64_there():
    "An MPS device has no float64; `meta` stands in for the device of the trial"
    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if (kwargs or {}).get('dtype')==torch.float64: seen.append(args[0].device.type)
            return func(*args, **(kwargs or {}))
    seen = []
    with Casts(),know_trial.CopiesTo('meta'): new = deepcopy(torch.ones(3))
    assert (seen,new.dtype,new.device.type)==(['meta'],torch.float64,'meta')
