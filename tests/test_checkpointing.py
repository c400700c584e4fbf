"""Blocks that are computed again in the backward pass: bit for bit the plain run.

The models are float32, as users train them, and nothing is allowed to differ: weights, buffers, the state of the
optimizer, losses, and the states of the generators. Only the memory at the peak does, and that is measured."""
import pytest
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack,nullcontext
from threading import Barrier
from nets import *
from fastai.text.all import AWD_LSTM,awd_lstm_clas_config,get_text_classifier,rnn_cbs
from fastai.vision.all import create_unet_model,create_vision_model,resnet18,vgg11_bn,xresnet18
from fastai_accum.memory.checkpointing import *
from fastai_accum.microbatch import *
from fastai_accum.proof.dry import planning
from fastai_accum.memory.offload import *
from test_memory import tower
from common import held_bytes,peak_bytes   # of benchmarks

def encoder():
    "PyTorch's transformer"
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
    return Made(lambda m, x: m.head(m.layers(x).mean(1)), layers=layers, head=nn.Linear(16, 3))

def pair_of(x, n=2): return lambda: [(o := x(), torch.randint(3, (len(o),))) for _ in range(n)]
def images(px=32, bs=4): return pair_of(lambda: torch.randn(bs,3,px,px))

def body(arch): return lambda: create_vision_model(arch, 3, pretrained=False)
def awd_lstm():
    config = {**awd_lstm_clas_config, **dict(emb_sz=20, n_hid=24, n_layers=2)}
    return get_text_classifier(AWD_LSTM, 100, 3, config=config)

# what is trained here; `make proved` has many more
archs = dict(resnet18=dict(make=body(resnet18), data=images()),
             encoder=dict(make=encoder, data=pair_of(lambda: torch.randn(4,7,16))),
             awd_lstm=dict(make=awd_lstm, data=pair_of(lambda: torch.randint(2, 100, (4,90))), cbs=rnn_cbs))

class Net(nn.Module):
    "What can go wrong, small: batch norm, dropout, a list that grows, keyword arguments, draws of NumPy and of Python"
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3,8,3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.body = nn.ModuleList([Odd() for _ in range(3)])
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8*49,3))
    def forward(self, x):
        xs = [self.stem(x)]
        for m in self.body: xs.append(m(xs, extra=dict(scale=torch.tensor(2.))))
        return self.head(sum(xs))

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv,self.bn,self.drop = nn.Conv2d(8,8,3,padding=1),nn.BatchNorm2d(8),nn.Dropout(.3)
        self.register_buffer('n', torch.zeros(()))
    def forward(self, xs, extra):
        self.n += 1
        x = self.drop(self.bn(self.conv(torch.stack(xs).mean(0))))
        return F.relu(x*extra['scale']*(np.random.rand()+.5)+random.random()+torch.rand(1).to(x))

def get_learner(make=Net, data=images(16, 12), cbs=noop, loss_func=None, **kwargs):
    "On the device of the test"
    set_seed(0)
    batches = data()
    device = here.device or 'cpu'
    dls = of_batches(batches, batches[:1], device=device)
    return quiet(Learner(dls, make(), loss_func=loss_func or nn.CrossEntropyLoss(), lr=1e-3, cbs=cbs(), **kwargs))

def bits(learn):
    "All that training leaves behind"
    rng = torch.get_rng_state(),tensor(np.random.get_state()[1].astype(int)),tensor(random.getstate()[1][:-1])
    return [weights(learn), list(learn.model.buffers()), opt_state(learn.opt), rng, learn.recorder.losses,
            learn.recorder.values]

def fitted(on=noop, fit=lambda l: l.fit_one_cycle(2), **kwargs):
    learn = get_learner(**kwargs)
    on(learn)
    set_seed(1)
    fit(learn)
    assert is_returned(learn)
    return learn

def same_bits(on=Learner.gradient_checkpointing, **kwargs):
    "The plain run, and the one with blocks that are computed again"
    a = bits(fitted(**kwargs))
    close(bits(fitted(on, **kwargs)), a, 0)

def spectral():
    net = Net()
    for m in net.body: m.conv = nn.utils.parametrizations.spectral_norm(m.conv)
    return net

def fits(learn): learn.lr_find(num_it=12, show_plot=False); learn.fine_tune(1); learn.fit(1)
def blocks(f): return dict(on=lambda l: l.gradient_checkpointing(f(l.model)))

others = dict(   # callbacks, beside which training is the same as with them alone
    coupled=lambda: MicroBatch(4, coupled=True), both=lambda: [MicroBatch(5), AccumulateStep(2)],
    micro_batch_bf16=lambda: [MicroBatch(4), OnCpu(torch.bfloat16)])
alike = dict(archs, odd={}, spectral=dict(make=spectral), offload=dict(cbs=OffloadActivations),
    accumulate=dict(cbs=lambda: AccumulateStep(2)), **{k:dict(cbs=v) for k,v in others.items()},
    fits=dict(fit=fits, splitter=lambda m: [params(m.stem), params(m.body), params(m.head)]),
    an_L=blocks(lambda m: L(m.body[0])), a_tuple=blocks(lambda m: (m.body[1],m.stem)),
    a_function=blocks(lambda m: risinstance(Odd)))

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('k', alike)
def test_checkpointing_bit_for_bit(k): same_bits(**alike[k])

def names(model): return ' '.join(map(str, find_blocks(model)))

counted = Counter()   # a global variable: what a hook holds is as it was after the second run

def calls(learn):
    "How often the blocks run in a fit, without its proof"
    counted.clear()
    def count(*_, i):
        if not planning.get(): counted.update([i])
    for i,m in enumerate(learn.model.body): m.conv.register_forward_hook(partial(count, i=i))
    return counted

def test_it_recomputes():
    "Blocks run twice in training and once in validation, and their own hooks once"
    learn,own = get_learner(),[]
    ns = calls(learn)
    learn.model.body[0].register_forward_hook(lambda *_: own.append(1))
    learn.gradient_checkpointing().fit(1)
    assert ns=={0:5, 1:5, 2:5} and len(own)==3, (ns,own)   # two batches, and one of validation

def in_two_threads(way, n):
    "What `n` models leave after two backward passes at the same time"
    set_seed(0)
    models,gate = [Net() for _ in range(n)],Barrier(2)
    def backward(loss): gate.wait(); loss.backward()
    with ExitStack() as stack,ThreadPoolExecutor(2) as pool:
        for m in models: stack.enter_context(way(SimpleNamespace(model=m)))
        outs = [models[i%n](torch.randn(4,3,16,16)) for i in range(2)]
        list(pool.map(backward, (outs[0].square().mean(), outs[1].sin().sum())))
    return [o for m in models for o in (*[p.grad for p in m.parameters()], *m.buffers())] + [torch.get_rng_state()]

@pytest.mark.parametrize('n', [1,2])
def test_two_threads_go_backward(n):
    "Through graphs of their own, of one model or of two: a sum of two gradients has no order"
    want = in_two_threads(nullcontext, n)
    for _ in range(5):
        got = in_two_threads(GradientCheckpointing().recomputing, n)
        assert all(map(torch.equal, got, want))

def changed(f):
    m = Net()
    f(m)
    return m

class InPlaceNet(Net):
    def forward(self, x): return super().forward(x.mul_(2))

class InPlace(Odd):
    def forward(self, xs, extra): xs[0].mul_(2); return super().forward(xs, extra)

must = r'blocks must be a list of modules, a function module -> bool such as risinstance\(MyBlock\), or None, got'
not_blocks = [
    (f'{must} 3', lambda m: 3), (f"{must} 'layer1'", lambda m: 'layer1'),
    ('blocks must be a list .* got Odd', lambda m: m.body[0]),
    (r'or None, got .*Linear', lambda m: nn.Linear),
    (r'blocks\[1\] is Linear, which is not in the model', lambda m: [m.body[0], nn.Linear(2,2)]),
    (r"blocks\[0\] is 'stem', which is not a module; pass modules of learn.model", lambda m: ['stem']),
    (r'blocks\[0\] is ModuleList, a list of modules, which the model never calls', lambda m: [m.body]),
    ('blocks overlap, since body.1.conv is inside body.1', lambda m: [m.body[1], m.body[1].conv]),
    ('blocks overlap, since stem is inside the model', lambda m: risinstance((Net,nn.Sequential))),
    (r'blocks selects no module of the model Net; pass blocks=\[...\]', lambda m: lambda o: False),
    ('stem is scripted', noop, lambda: changed(lambda m: setattr(m, 'stem', torch.jit.script(m.stem)))),
    ('body.1 is compiled', noop, lambda: changed(lambda m: m.body[1].compile())),
    ('the model is compiled', noop, lambda: torch.compile(Net())),
    # what is a tensor is named, by the proof; otherwise the first batch fails
    ('inplace operation', noop, lambda: changed(lambda m: m.body.__setitem__(1, InPlace()))),
    ('the model changes its input in place, so it cannot be computed again; leave it out of blocks',
     lambda m: risinstance(InPlaceNet), InPlaceNet)]

def test_blocks_that_are_refused():
    for says,blocks,*make in not_blocks:
        learn = get_learner(*make)
        blocks = None if blocks is noop else blocks(learn.model)
        refused(learn, says, (ValueError,RuntimeError), lambda l: l.gradient_checkpointing(blocks).fit(1))

def plain(n): return nn.Sequential(*[nn.Linear(2,2) for _ in range(n)])
def weight_normed(): return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3,3,1)), nn.ReLU())

def shares_its_activation():
    act = nn.ReLU(inplace=True)
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(2,2),act)])

found = [
    (body(resnet18),  '0[0:4] 0.4.0 0.4.1 0.5.0 0.5.1 0.6.0 0.6.1 0.7.0 0.7.1 model[1:2]'),
    (lambda: xresnet18(n_out=3), 'model[0:4] 4.0 4.1 5.0 5.1 6.0 6.1 7.0 7.1 model[8:12]'),
    (body(vgg11_bn),  '0.0[0:7] 0.0[7:14] 0.0[14:21] 0.0[21:28] model[1:2]'),
    (encoder,         'layers.layers.0 layers.layers.1 layers.layers.2'),
    # parametrizations keep their weights in a list of modules
    *((o, 'stem[0:4] body.0 body.1 body.2 head[0:2]') for o in (Net,spectral)), (weight_normed, 'model[0:2]'),
    # a plain chain has about √n layers in each, however short it is; a short row in a larger model is one block
    (lambda: plain(4), 'model[0:2] model[2:4]'), (lambda: plain(9), 'model[0:3] model[3:6] model[6:9]'),
    (lambda: plain(30), 'model[0:6] model[6:12] model[12:18] model[18:24] model[24:30]'),
    *((lambda n=n: nn.Sequential(Odd(), Odd(), *plain(n)), f'0 1 model[2:{n+2}]') for n in (4,9))]

def test_find_blocks():
    for make,expected in found: assert names(make())==expected
    for make in *(make for make,_ in found),awd_lstm,lambda: create_unet_model(resnet18, 3, (32,32), pretrained=False):
        inside = [id(o) for b in find_blocks(make()) for m in b.ms for o in m.modules()]
        assert inside and len(inside)==len(set(inside)), 'blocks overlap'
    assert str(Block('', plain(4)))=='the model' and names(shares_its_activation())=='model[0:4] model[4:8]'

def test_memory_of_checkpointing():
    "Bytes at the peak of a training step of 8 images of 64 pixels, parameters and buffers included"
    def peak(on):
        learn = get_learner(partial(tower, n=10), lambda: images(64, 8)()[:1], opt_func=SGD)
        on(learn.add_cb(NoValid()))
        learn.fit(1)
        return peak_bytes(lambda: learn.fit(1), torch.device('cpu'))+held_bytes(learn)[0]
    a,b = peak(Learner.gradient_checkpointing),peak(noop)
    assert a/b<=.4, f'{a/b:.3f} of the memory of the plain run'
