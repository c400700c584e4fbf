"What PyTorch does in another way on a GPU, done on the CPU"
from harness import *
from fastai_accum.exact.draws import Draw,batch_dims
from fastai_accum.devices import generator_of
from fastai_accum.proof import guard as the_guard
from fastai_accum.modes import Coins,middle,quiet
from fastai_accum.proof.compare import NotTried

pytestmark = simulated

def test_a_dropout_that_is_off_draws_nothing():
    "At p=0, the dropout of a GPU drops one number in thirty million"
    x,state = torch.randn(8, requires_grad=True),torch.get_rng_state()
    with Coins(middle): out,mask = torch.native_dropout(x, .3, True)
    assert torch.equal(out, x) and mask.all() and torch.equal(torch.get_rng_state(), state)

@each(case=[('rand', (2,), (3,4), 'do not show which dimension'),   # a size of another dimension
            *((f'_scaled_dot_product_{k}_attention', (2,2,5), (3,2,5), 'the Attention draws with .*sdpa_kernel.*MATH')
              for k in ('flash','efficient','cudnn'))])
def test_draws_that_cannot_be_cut(case):
    "Attention that draws inside is refused with the line that takes it apart: then it is `scaled` in `test_exact`"
    name,*sizes,match = case
    a,b = ([Draw(getattr(torch.ops.aten, name).default, [o]*4, [()]*4, 'the Attention', None)] for o in sizes)
    with pytest.raises(ValueError, match=match): batch_dims(a, b, 2, 3)

def test_an_unsteady_model_is_not_proved(monkeypatch):
    "The whole batch does not do the same twice: another precision or size says nothing"
    def unsteady(*args): raise NotTried('the whole batch does not do the same twice')
    monkeypatch.setattr(the_guard, 'compare', unsteady)
    learn = make_learner(make_dls(16, 8), cbs=MicroBatch(4, coupled=True))
    with pytest.warns(UserWarning, match='was not tried.*does not do the same twice'): learn.fit(1)

def test_a_trial_does_not_talk_to_other_processes(monkeypatch):
    "`SyncBatchNorm` wants a GPU if there are processes to talk to"
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    m,x = nn.SyncBatchNorm(6).double(),features(4)
    with pytest.raises(ValueError, match='to be on GPU'): m(x)
    with quiet(): assert torch.equal(m(x), F.batch_norm(x, None, None, training=True))
    assert torch.distributed.is_initialized()

@each(kind=['cuda','cuda:0'])
def test_generators_before_the_gpu_is_used(kind, monkeypatch):
    "PyTorch makes them when CUDA begins, such as for a learner that has not trained yet"
    g = torch.Generator()
    def begin(): monkeypatch.setattr(torch.cuda, 'default_generators', (g,)); return 0
    monkeypatch.setattr(torch.cuda, 'current_device', begin)
    assert generator_of(kind) is g
