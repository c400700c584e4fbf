"""Blocks that are computed again in the backward pass: bit for bit the plain run.

The models are float32, as users train them, and nothing is allowed to differ: weights, buffers, the state of the
optimizer, losses, and the states of the generators. Only the memory at the peak does, and that is measured."""
import pickle,pytest,sys
from contextlib import suppress
from pathlib import Path
from harness import *
from fastai.text.all import AWD_LSTM,awd_lstm_clas_config,get_text_classifier,rnn_cbs
from fastai.vision.all import create_unet_model,create_vision_model,resnet18,vgg11_bn,xresnet18
from fastai_accum.memory.checkpointing import *
from fastai_accum.microbatch import *
from fastai_accum.memory.offload import *
from fastai_accum.memory.offload import Host
sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'benchmarks'))
from common import held_bytes,peak_bytes

class Encoder(nn.Module):
    "PyTorch's transformer"
    def __init__(self, d=16, n=3):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, 2, 2*d, batch_first=True)
        self.layers,self.head = nn.TransformerEncoder(layer, n),nn.Linear(d, 3)
    def forward(self, x): return self.head(self.layers(x).mean(1))

def pair_of(x, y, n=2): return lambda: [(x(), y()) for _ in range(n)]
def images(px=32, bs=4): return pair_of(lambda: torch.randn(bs,3,px,px), lambda: torch.randint(3, (bs,)))
vectors = pair_of(lambda: torch.randn(4,7,16), lambda: torch.randint(3, (4,)))
texts   = pair_of(lambda: torch.randint(2, 100, (4,90)), lambda: torch.randint(3, (4,)))

def body(arch): return lambda: create_vision_model(arch, 3, pretrained=False)
def awd_lstm():
    config = {**awd_lstm_clas_config, **dict(emb_sz=20, n_hid=24, n_layers=2)}
    return get_text_classifier(AWD_LSTM, 100, 3, config=config)

# what is trained here; `make proved` has many more
archs = dict(resnet18=(body(resnet18), images()), encoder=(Encoder, vectors),
             awd_lstm=(awd_lstm, texts, dict(cbs=rnn_cbs)))

def get_learner(make, data, cbs=noop, loss_func=None, **kwargs):
    "On the device of the test"
    set_seed(0)
    batches = data()
    device = here.device or 'cpu'
    dls = DataLoaders(*[DataLoader(o, bs=None, device=device) for o in (batches, batches[:1])], device=device)
    learn = Learner(dls, make(), loss_func=loss_func or nn.CrossEntropyLoss(), lr=1e-3, cbs=cbs(), **kwargs)
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

def bits(learn):
    "All that training leaves behind"
    opt = [v for s in opt_state(learn.opt) for k,v in sorted(s.items()) if isinstance(v, Tensor)]
    rng = [torch.get_rng_state(), tensor(np.random.get_state()[1].astype(int)), tensor(random.getstate()[1][:-1])]
    ts = [*learn.model.parameters(), *learn.model.buffers(), *opt, *rng]
    return [o.detach().clone() for o in ts],learn.recorder.losses,learn.recorder.values

def fitted(*args, blocks=None, plain=True, fit=None, on=Learner.gradient_checkpointing, **kwargs):
    learn = get_learner(*args, **kwargs)
    if not plain: on(learn)
    set_seed(1)
    (fit or (lambda l: l.fit_one_cycle(2)))(learn)
    assert is_returned(learn)
    return learn

def assert_equal(a, b):
    "Bit for bit"
    (ta,*ra),(tb,*rb) = a,b
    assert len(ta)==len(tb)
    bad = [(i,(x-y).abs().max().item()) for i,(x,y) in enumerate(zip(ta,tb)) if not torch.equal(x, y)]
    assert not bad, f'{len(bad)} of {len(ta)} tensors differ: {bad[:5]}'
    def floats(o): return [floats(x) for x in o] if isinstance(o, (list,L)) else float(o)
    assert floats(L(ra).concat())==floats(L(rb).concat())

def same_bits(*args, **kwargs):
    "The plain run, and the one with blocks that are computed again"
    a = bits(fitted(*args, **kwargs))
    assert_equal(bits(fitted(*args, plain=False, **kwargs)), a)

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('arch', archs)
def test_checkpointing_bit_for_bit(arch):
    "Over two epochs with batch norm, dropout, weight dropout, and hidden states"
    make,data,*kw = archs[arch]
    same_bits(make, data, **(kw[0] if kw else {}))

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

odd = Net,images(16, 12)

def test_odd_blocks():
    same_bits(*odd)
    learn = fitted(*odd, plain=False)
    # two epochs of two batches, and one of validation
    assert all(m.n==6 for m in learn.model.body), 'a buffer moved twice'

others = dict(
    accumulate=lambda: AccumulateStep(2), coupled=lambda: MicroBatch(4, coupled=True),
    both=lambda: [MicroBatch(5), AccumulateStep(2)], micro_batch_bf16=lambda: [MicroBatch(4), OnCpu(torch.bfloat16)],
    offload=lambda: OffloadActivations())

@pytest.mark.parametrize('k', others)
def test_checkpointing_beside(k):
    "With other callbacks, training is the same as with those callbacks alone"
    same_bits(*odd, cbs=others[k])

@each(blocks=[lambda o: L(o.body[0]), lambda o: (o.body[1],o.stem), lambda o: risinstance(Odd)])
def test_blocks(blocks):
    "Blocks of one's own"
    same_bits(*odd, on=lambda l: l.gradient_checkpointing(blocks(l.model)))

def test_it_sees_through_parametrizations():
    "Of weight norm and spectral norm, which keep their weights in a list of modules"
    def make():
        net = Net()
        for m in net.body: m.conv = nn.utils.parametrizations.spectral_norm(m.conv)
        return net
    assert [str(b) for b in find_blocks(make())]==[str(b) for b in find_blocks(Net())]
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(3,3,1))
    assert [str(b) for b in find_blocks(nn.Sequential(normed, nn.ReLU()))]==['model[0:2]']
    same_bits(make, images(16, 12))

def test_checkpointed_fits():
    "Frozen and unfrozen, `lr_find` before, several fits"
    def fit(learn): learn.lr_find(num_it=12, show_plot=False); learn.fine_tune(1); learn.fit(1)
    def split(m): return [params(m.stem), params(m.body), params(m.head)]
    same_bits(*odd, fit=fit, splitter=split)

def calls(learn):
    "How often the blocks run in a fit"
    ns = Counter()
    for i,m in enumerate(learn.model.body): m.conv.register_forward_hook(lambda *_, i=i: ns.update([i]))
    return ns

def test_it_recomputes():
    "Blocks run twice in training and once in validation, and their own hooks once"
    learn,own = get_learner(*odd),[]
    ns = calls(learn)
    learn.model.body[0].register_forward_hook(lambda *_: own.append(1))
    learn.gradient_checkpointing().fit(1)
    assert ns=={0:5, 1:5, 2:5} and len(own)==3, (ns,own)   # two batches, and one of validation

def ender(exc, event):
    def f(cb):
        if cb.training and not vars(cb.learn).get('iter'): raise exc('ended')
    return Callback(**{event:f})

ends = OSError,KeyboardInterrupt,CancelFitException,CancelEpochException,CancelTrainException,CancelBatchException
training_events = """before_epoch before_train before_batch after_pred after_loss after_backward after_step after_batch
after_train after_epoch""".split()

@drawn(8, exc=ends, event=training_events)
def test_checkpointing_ends(exc, event):
    "However a fit ends, nothing is left, and the next fit is that of a learner that was ended the same way"
    def run(learn):
        with suppress(exc, RuntimeError): learn.fit(2, cbs=ender(exc, event))
        learn.opt.zero_grad()
        learn.model.eval()
        assert is_returned(learn), [k for k,m in learn.model.named_modules() if 'forward' in vars(m)]
        learn.fit(1)
    same_bits(*odd, fit=run)

def interrupt(cb): raise KeyboardInterrupt

@drawn(6, event=['before_fit', *training_events, 'before_validate'], order=[-1000,0,1000])
def test_ctrl_c_beside_memory_savers(event, order):
    "Ctrl-C in another callback leaves nothing of both in the learner: it has the attributes of the plain one"
    def run(*cbs):
        learn = get_learner(*odd)
        learn.add_cbs(cbs)
        ctrl_c = Callback(**{event:interrupt})
        ctrl_c.order = order
        with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=ctrl_c)
        return learn
    a,b = run(),run(GradientCheckpointing(), OffloadActivations())
    names = {cb.name for cb in b.cbs}
    assert is_returned(b) and set(vars(b))-names==set(vars(a))-names
    assert [set(vars(m)) for m in b.model.modules()]==[set(vars(m)) for m in a.model.modules()]
    b.fit(1)
    assert is_returned(b)

def test_copies():
    "A model that is copied or pickled in the middle of a fit is the plain one"
    got = []
    def saves(cb):
        if cb.training: got.extend([pickle.loads(pickle.dumps(cb.learn.model)), deepcopy(cb.learn.model)])
    learn = get_learner(*odd).gradient_checkpointing()
    learn.fit(1, cbs=Callback(after_loss=saves))
    for m in got[:2]:
        ran = []
        m.body[0].conv.register_forward_hook(lambda *_: ran.append(1))
        m(torch.randn(2,3,16,16)).sum().backward()
        assert len(ran)==1
        assert [str(b) for b in find_blocks(m)]==[str(b) for b in find_blocks(learn.model)]!=[]
    new = deepcopy(learn)
    for l in learn,new:
        set_seed(3)
        l.fit(1)
        assert is_returned(l)
    assert_equal(bits(new)[:1], bits(learn)[:1])

def test_removed():
    "Removed in the middle of an epoch: that epoch is finished as it began, and the next is plain"
    learn = get_learner(*odd).gradient_checkpointing()
    ns,seen = calls(learn),[]
    def f(cb):
        if cb.training: cb.learn.remove_cb(GradientCheckpointing)
    learn.fit(2, cbs=[Callback(after_batch=f), Callback(after_train=lambda cb: seen.append(ns[0]))])
    assert seen==[4,7] and is_returned(learn), seen

def test_added():
    "Added by another callback, and replaced by the method"
    learn = get_learner(*odd).gradient_checkpointing().gradient_checkpointing(risinstance(Odd))
    assert sum(isinstance(o, GradientCheckpointing) for o in learn.cbs)==1 and learn.checkpointing.blocks is not None
    learn = get_learner(*odd)
    ns = calls(learn)
    def add(cb):
        if not learn.cbs.filter(risinstance(GradientCheckpointing)): learn.add_cb(GradientCheckpointing())
    learn.fit(2, cbs=Callback(before_batch=add))
    assert ns[0]==3+5 and is_returned(learn)   # from the next epoch on

def refuse(pat, blocks=None, make=None):
    learn = get_learner(make or Net, odd[1])
    if callable(blocks): blocks = blocks(learn.model)
    with pytest.raises(ValueError, match=pat): learn.gradient_checkpointing(blocks).fit(1)

def test_blocks_that_are_refused():
    must = r'blocks must be a list of modules, a function module -> bool such as risinstance\(MyBlock\), or None, got'
    for o in (3, 'layer1'): refuse(f'{must} {o!r}', o)
    refuse('blocks must be a list .* got Odd', lambda m: m.body[0])
    with pytest.raises(ValueError, match=r'or None, got .*Linear'): GradientCheckpointing(nn.Linear)
    refuse(r'blocks\[1\] is Linear, which is not in the model', lambda m: [m.body[0], nn.Linear(2,2)])
    refuse(r"blocks\[0\] is 'stem', which is not a module; pass modules of learn.model", ['stem'])
    refuse(r'blocks\[0\] is ModuleList, a list of modules, which the model never calls', lambda m: [m.body])
    refuse(r'blocks overlap, since body.1.conv is inside body.1', lambda m: [m.body[1], m.body[1].conv])
    refuse(r'blocks overlap, since stem is inside the model', lambda m: lambda o: isinstance(o, (Net,nn.Sequential)))
    refuse(r'blocks selects no module of the model Net; pass blocks=\[...\]', lambda m: lambda o: False)
    class Mlp(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = nn.Linear(3*256,8),nn.Linear(8,3)
        def forward(self, x): return self.b(self.a(x.flatten(1)).tanh())
    refuse(r'found no blocks in the model Mlp; pass blocks=\[...\], .* or blocks=f', make=Mlp)
    def changed(f):
        m = Net()
        f(m)
        return m
    refuse('stem is scripted', make=lambda: changed(lambda m: setattr(m, 'stem', torch.jit.script(m.stem))))
    refuse('body.1 is compiled', make=lambda: changed(lambda m: m.body[1].compile()))
    refuse('the model is compiled', make=lambda: torch.compile(Net()))

class InPlaceNet(Net):
    def forward(self, x): return super().forward(x.mul_(2))

class InPlace(Odd):
    def forward(self, xs, extra):
        xs[0].mul_(2)
        return super().forward(xs, extra)

def test_in_place():
    "A block that changes its input in place is refused: by name if the input is a tensor"
    def make():
        m = Net()
        m.body[1] = InPlace()
        return m
    named = 'the model changes its input in place, so it cannot be computed again; leave it out of blocks'
    for model,blocks,why in (make,None,'inplace operation'),(InPlaceNet,risinstance(InPlaceNet),named):
        learn = get_learner(model, odd[1]).gradient_checkpointing(blocks)
        with pytest.raises((ValueError,RuntimeError), match=why): learn.fit(1)   # by the proof, or in the first batch
        assert is_returned(learn)

found = [
    (body(resnet18),  '0[0:4] 0.4.0 0.4.1 0.5.0 0.5.1 0.6.0 0.6.1 0.7.0 0.7.1 model[1:2]'),
    (lambda: xresnet18(n_out=3), 'model[0:4] 4.0 4.1 5.0 5.1 6.0 6.1 7.0 7.1 model[8:12]'),
    (body(vgg11_bn),  '0.0[0:7] 0.0[7:14] 0.0[14:21] 0.0[21:28] model[1:2]'),
    (Encoder,         'layers.layers.0 layers.layers.1 layers.layers.2')]

def test_find_blocks():
    for make,names in found: assert ' '.join(map(str, find_blocks(make())))==names
    for make in *(make for make,_ in found),awd_lstm,lambda: create_unet_model(resnet18, 3, (32,32), pretrained=False):
        inside = [id(o) for b in find_blocks(make()) for m in b.ms for o in m.modules()]
        assert inside and len(inside)==len(set(inside)), 'blocks overlap'

def plain(n): return nn.Sequential(*[nn.Linear(2,2) for _ in range(n)])

def test_a_plain_chain_in_pieces():
    "About √n layers in each, however short it is; a short row in a larger model is one block"
    for n,sizes in (4,[2,2]),(9,[3,3,3]),(30,[6]*5):
        assert [len(b.ms) for b in find_blocks(plain(n))]==sizes
    assert str(Block('', plain(4)))=='the model' and str(find_blocks(plain(4))[1])=='model[2:4]'
    for n in 4,9:
        in_a_model = find_blocks(nn.Sequential(Odd(), Odd(), *plain(n)))
        assert [str(b) for b in in_a_model]==['0','1',f'model[2:{n+2}]']

def tower():
    "Ten blocks, whose activations are most of the memory"
    def conv(n): return nn.Sequential(nn.Conv2d(n, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    blocks = [nn.Sequential(conv(16), conv(16)) for _ in range(10)]
    return nn.Sequential(conv(3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16,3))

def peak_of(on=noop):
    "Bytes at the peak of a training step of 8 images of 64 pixels, its parameters and buffers included"
    learn = get_learner(tower, images(64, 8), opt_func=SGD)
    learn.add_cb(NoValid())
    on(learn)
    batches = learn.dls.train.dataset[:1]
    learn.dls = DataLoaders(DataLoader(batches, bs=None), DataLoader(batches, bs=None))
    learn.fit(1)
    return peak_bytes(lambda: learn.fit(1))+held_bytes(learn)[0]

def test_memory_of_checkpointing():
    a,b = peak_of(Learner.gradient_checkpointing),peak_of()
    assert a/b<=.4, f'{a/b:.3f} of the memory of the plain run'

def test_offload_on_the_cpu():
    "It is the plain run, and nothing is copied"
    m,x = nn.Sequential(nn.Linear(64,64), nn.Tanh()),torch.randn(32,64)
    host = Host(m)
    assert host.put(x) is x
    with host.hooks(): m(x).sum().backward()
    assert host.most==0
