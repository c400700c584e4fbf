"""Batch norm, dropout, and losses over the whole batch, with what makes them exact.

`MicroBatch(exact=True)` and `coupled=True` give the run with the large batch up to rounding, in float64;
`GradientCheckpointing` and `OffloadActivations` give it bit for bit. tests/corners has many more models."""
import pickle
import pytest
from harness import *
from fastai_accum.all import *
from fastai_accum.replace import Lent

images = torch.randn(20,3,16,16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

class Net(nn.Module):
    "Batch norm, dropout, a skip connection, and a mask of its own"
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        conv = partial(nn.Conv2d, kernel_size=3, bias=False)   # batch norm would leave only rounding to a bias
        self.stem = nn.Sequential(conv(3, 4, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(.2))
        self.blocks = nn.ModuleList([nn.Sequential(conv(4, 4, padding=1), nn.BatchNorm2d(4)) for _ in range(2)])
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(.3), nn.Linear(196,3))
    def forward(self, x):
        x = self.stem(x)
        for m in self.blocks: x = F.relu(x+m(x)*torch.rand(len(x),1,1,1, device=x.device))
        return self.head(x)

def train(*cbs, model=Net, lr=1e-3, bs=8, **kwargs):
    "A fit, and the state of the random generators after it"
    set_seed(0)
    learn = make_learner(make_dls(20, bs, x=images), model().double(), opt_func=partial(SGD, mom=.9), cbs=cbs, lr=lr,
                         splitter=params, **kwargs)
    set_seed(1)
    learn.fit_one_cycle(2, lr)
    learn.rng = torch.get_rng_state(),random.getstate(),np.random.get_state()[1].tolist()
    if here.device and here.device.type!='cpu': learn.rng += torch.get_device_module(here.device).get_rng_state(here.device),
    return learn

def is_clean(learn):
    "Whether nothing of ours is in the learner or in its model"
    return not any(isinstance(v, Lent) for o in (learn,*learn.model.modules()) for v in vars(o).values())

def assert_exact(learn, large, **kwargs):
    assert_same(learn, large, **kwargs)
    close(learn.rng, large.rng, 0)   # the generators end at the same place
    assert is_clean(learn)

# ---- MicroBatch

@pytest.mark.parametrize('bs', [1,3,7,'auto'])
def test_exact(bs, device): assert_exact(train(MicroBatch(bs, exact=True)), train())

def test_exact_without_batch_norm(device):
    def model(): m = Net(); m.stem[1] = m.blocks[0][1] = m.blocks[1][1] = nn.Identity(); return m
    assert_exact(train(MicroBatch(3, exact=True), model=model), train(model=model))

def test_exact_beside_accumulate_step(device):
    assert_exact(train(AccumulateStep(2), MicroBatch(2, exact=True), bs=5), train(AccumulateStep(2), bs=5))

def rmse(pred, y): return ((pred-F.one_hot(y,3))**2).mean().sqrt()

@pytest.mark.parametrize('kw', [dict(coupled=True), dict(exact=True)], ids=str)
def test_a_loss_over_the_whole_batch(kw, device):
    def model(): torch.manual_seed(2); return nn.Sequential(nn.Flatten(), nn.Linear(768,8), nn.Tanh(), nn.Linear(8,3))
    assert_exact(train(MicroBatch(3, **kw), model=model, loss_func=rmse), train(model=model, loss_func=rmse))

class Shuffles(nn.Module):
    def forward(self, x): return x+x[torch.randperm(len(x))]

def test_what_cannot_be_exact_is_refused_by_name():
    def model(): m = Net(); m.head.append(Shuffles()); return m
    with pytest.raises(ValueError, match="Shuffles 'head.3' draws with randperm"):
        train(MicroBatch(3, exact=True), model=model)
    with pytest.raises(ValueError, match='exact=True and GradientCheckpointing cannot be combined'):
        train(MicroBatch(3, exact=True), GradientCheckpointing())

def test_it_says_once_what_it_does(capsys):
    learn = train(MicroBatch(3, exact=True))
    learn.fit(1)
    assert capsys.readouterr().out.count('exact=True is proved on your model')==1

# ---- GradientCheckpointing and OffloadActivations

memory = dict(checkpointing=[GradientCheckpointing], offload=[OffloadActivations],
              both=[GradientCheckpointing,OffloadActivations], turned=[OffloadActivations,GradientCheckpointing])

@pytest.mark.parametrize('others', [[], [AccumulateStep(2)], [MicroBatch(3)]], ids=str)
@pytest.mark.parametrize('k', memory)
def test_bit_for_bit(k, others):
    a,b = (train(*deepcopy(others), *[cb() for cb in cbs]) for cbs in (memory[k],[]))
    assert_exact(a, b, tol=0)

# ---- nothing stays behind

everything = dict(exact=lambda: [MicroBatch(3, exact=True)], coupled=lambda: [MicroBatch(3, coupled=True)],
                  memory=lambda: [GradientCheckpointing(),OffloadActivations()])

@pytest.mark.parametrize('event', ['before_fit','before_train','after_pred','after_backward','before_validate'])
@pytest.mark.parametrize('k', everything)
def test_ctrl_c(k, event, device):
    def interrupt(cb): raise KeyboardInterrupt
    learn = make_learner(make_dls(20, 8, x=images), Net().double(), cbs=everything[k](), splitter=params)
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Callback(**{event:interrupt}))
    assert is_clean(learn)
    learn.fit(1)

@pytest.mark.parametrize('how', [deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=['deepcopy','pickle'])
@pytest.mark.parametrize('k', everything)
def test_copies_in_the_middle_of_a_batch(k, how):
    "As of a callback that averages weights: a copy runs by itself, as a plain model"
    class Copies(Callback):
        def after_backward(self): self.copy = how(self.learn.model)
    copy = train(Copies(), *everything[k]()).copies.copy
    assert not any(isinstance(v, Lent) for m in copy.modules() for v in vars(m).values())
    plain = Net().double()
    plain.load_state_dict(copy.state_dict())
    preds = [m.eval()(images[:4]) for m in (copy,plain) if set_seed(0) is None]
    assert torch.equal(*preds)
