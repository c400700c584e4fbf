"Adaptive gradient clipping against the equations written out, and against timm where it is installed"
import pytest
from harness import *
from fastai_accum.extras.clip import *
from fastai.callback.fp16 import MixedPrecision

def model():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(2,4,3), nn.GroupNorm(2,4), nn.Tanh(), nn.Flatten(), nn.Linear(16,5), nn.Tanh(),
                      nn.Linear(5,3)).double()
    with torch.no_grad(): m[4].weight[1] = 0; m[4].bias.zero_()
    return m

def backward(m, scale=1.):
    x = torch.randn(9,2,4,4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    m.zero_grad()
    (m(x)[:,:2].square().sum()*scale).backward()   # the last output has a gradient of zero

def by_hand(p, clip_factor, eps):
    "Equation 3, one unit and one number at a time"
    units = [(p, p.grad)] if p.ndim<2 else list(zip(p, p.grad))
    res = []
    for w,g in units:
        wn,gn = (math.sqrt(sum(v*v for v in o.flatten().tolist())) for o in (w,g))
        ratio = gn/max(wn, eps)
        res.append(g*clip_factor*max(wn, eps)/gn if ratio>clip_factor else g.clone())
    return res[0] if p.ndim<2 else torch.stack(res)

@pytest.mark.parametrize('clip_factor,eps', [(.01,1e-3), (.1,.5), (10.,1e-3)])
@pytest.mark.parametrize('scale', [1e-4, 1., 1e4])
def test_equation(scale, clip_factor, eps):
    m = model(); backward(m, scale)
    exact = [by_hand(p, clip_factor, eps) for p in m.parameters()]
    clip_grad_adaptive_(m.parameters(), clip_factor, eps)
    assert rel([p.grad for p in m.parameters()], exact)[0]<=TOL

def test_timm():
    "The same as timm's, which also clips the whole vector of a bias"
    agc = pytest.importorskip('timm.utils.agc', reason='compares with the clipping of timm, which is not installed')
    a,b = model(),model()
    for m in (a,b): backward(m, 100.)
    clip_grad_adaptive_(a.parameters()); agc.adaptive_clip_grad(b.parameters(), clip_factor=0.01, eps=1e-3)
    assert rel([p.grad for p in a.parameters()], [p.grad for p in b.parameters()])[0]<=TOL

def test_edges():
    "No gradient, a gradient of zero, scalars, no parameter at all; what is not finite stays visible"
    p,q,r = (nn.Parameter(torch.ones(2,3)) for _ in range(3))
    q.grad,r.grad = torch.zeros(2,3),tensor([[1.,1.,1.],[math.nan,0.,0.]])
    s = nn.Parameter(tensor(2.)); s.grad = tensor(5.)
    clip_grad_adaptive_([p,q,r,s]); clip_grad_adaptive_([])
    assert p.grad is None and not q.grad.any() and s.grad.item()==pytest.approx(.02)
    assert r.grad[0].norm().item()==pytest.approx(.01*math.sqrt(3)) and r.grad[1].isnan().any()

def clipped(exclude, m=None):
    "The modules whose gradients `AdaptiveGradientClip` changes"
    m = m or model()
    names = {id(p):n for n,p in m.named_parameters()}
    learn = make_learner(make_dls(64, 8), m, cbs=AdaptiveGradientClip(1e-6, exclude=exclude), splitter=trainable_params)
    backward(m)
    old = {n:p.grad.clone() for n,p in m.named_parameters()}
    learn.adaptive_gradient_clip.before_step()
    return {n.split('.')[0] for n,p in m.named_parameters() if not torch.equal(p.grad, old[n])}

def test_exclude():
    "The last linear layer by default; a module, a list, nothing"
    m = model()
    assert clipped(None)=={'0','1','4'} and clipped([])=={'0','1','4','6'}
    assert clipped(m[0], m)=={'1','4','6'} and clipped([m[0],m[4]], m)=={'1','6'}

def test_order():
    "Where fastai's clipping is: after mixed precision has unscaled"
    assert AdaptiveGradientClip.order==GradientClip.order>MixedPrecision.order

@pytest.mark.parametrize('opt', [SGD,Adam])
def test_accumulated(opt):
    "Clips the finished gradient of the window: everything as with the large batch"
    a,b = (make_learner(make_dls(76, bs), cbs=[AdaptiveGradientClip(.01), *L(cbs)],
                        opt_func=opt) for bs,cbs in ((8,AccumulateStep(4)), (32,None)))
    for l in (a,b): l.fit_one_cycle(2)
    assert_same(a, b)

bad = [dict(clip_factor=0), dict(clip_factor=True), dict(clip_factor='1'), dict(eps=-1), dict(eps=math.nan),
       dict(exclude='head')]
@pytest.mark.parametrize('kw', bad, ids=str)
def test_bad_arguments(kw):
    with pytest.raises(ValueError, match=f'AdaptiveGradientClip: {list(kw)[0]} must'): AdaptiveGradientClip(**kw)

def test_exclude_of_another_model():
    learn = make_learner(make_dls(64, 8), cbs=AdaptiveGradientClip(exclude=nn.Linear(3,3)))
    with pytest.raises(ValueError, match='AdaptiveGradientClip: exclude holds a module that the model does not'):
        learn.fit(1)
