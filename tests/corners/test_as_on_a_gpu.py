"What PyTorch does in another way on a GPU, done on the CPU: no GPU is needed"
from harness import *
from test_exact import X2,Y2,draws,same
from fastai_accum.exact.draws import Draw,batch_dims
from fastai_accum.know.trial import Middles

pytestmark = needs_exact

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
