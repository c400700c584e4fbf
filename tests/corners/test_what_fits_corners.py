"`learn.what_fits()` on texts, tables, segmentation, several inputs, mixed precision, and learners in odd states"
import sys
import pytest
from harness import *
from test_what_fits import fits,learner,net,plain_slices,quick,same,state,ways
from fastai.tabular.all import TabularDataLoaders,Categorify,Normalize,tabular_learner
from fastai.text.all import (AWD_LSTM,TextDataLoaders,awd_lstm_clas_config,awd_lstm_lm_config,language_model_learner,
                             text_classifier_learner)
from fastai.vision.all import CrossEntropyLossFlat,create_unet_model,xresnet18

def quiet(learn):
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

def check(learn, budget='1KB'):
    "The result; the learner is as before"
    before = state(learn)[:4]
    res = fits(learn, budget)
    assert same(before, state(learn)[:4])
    return res

def test_texts_are_measured_with_the_longest():
    random.seed(0)
    texts = [' '.join(random.choices('abcdefgh', k=n)) for n in [*range(5,64), 90]]
    df = pd.DataFrame(dict(text=texts, label=random.choices('xy', k=60)))
    dls = TextDataLoaders.from_df(df, text_col='text', label_col='label', valid_pct=.1, seed=1, bs=8, device='cpu')
    config = dict(awd_lstm_clas_config, emb_sz=8, n_hid=12, n_layers=2)
    learn = quiet(text_classifier_learner(dls, AWD_LSTM, pretrained=False, config=config))
    found = check(learn)
    longest = max(len(o[0]) for o in dls.train_ds)
    assert ways.largest_batch(learn)[0].shape[1]==longest
    assert found.ways[0].is_same and 'other dropout masks' in plain_slices(found).changes
    taken = ways.peak_bytes(lambda: learn.fit(2, cbs=Callback(before_validate=skip)))
    assert abs(taken-found.ways[0].peak)<.05*taken   # though callbacks of RNNs keep activations

def skip(cb): raise CancelValidException

def test_language_model():
    df = pd.DataFrame(dict(text=[' '.join(random.choices('abcdefgh', k=50)) for _ in range(60)]))
    dls = TextDataLoaders.from_df(df, text_col='text', is_lm=True, bs=8, seq_len=16, device='cpu')
    config = dict(awd_lstm_lm_config, emb_sz=8, n_hid=12, n_layers=2)
    found = check(quiet(language_model_learner(dls, AWD_LSTM, pretrained=False, config=config)))
    assert len(found.ways)>1 and 'on 8 samples' in found.note

def test_tables():
    n = 400
    df = pd.DataFrame(dict(a=np.random.rand(n), b=np.random.choice(list('xyz'), n), y=np.random.choice([0,1], n)))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify,Normalize], cat_names=['b'], cont_names=['a'], y_names='y',
                                     y_block=CategoryBlock(), bs=64, device='cpu')
    found = check(quiet(tabular_learner(dls, layers=[20,10])))
    cut = plain_slices(found)
    assert cut.changes=='batch norm sees 32 of 64'   # two inputs

def test_segmentation():
    data = [(torch.randn(3, 32, 32), torch.randint(0, 3, (32, 32))) for _ in range(8)]
    dls = DataLoaders.from_dsets(data, data, bs=4, device='cpu')
    model = create_unet_model(xresnet18, 3, (32, 32), pretrained=False)
    found = check(quiet(Learner(dls, model, loss_func=CrossEntropyLossFlat(axis=1))))
    assert {o.changes.split(' sees')[0] for o in found.ways}=={'nothing','batch norm'}

def test_mixed_precision():
    plain,mixed = check(learner()),check(learner(cbs=OnCpu(torch.bfloat16)))
    assert mixed.ways[0].peak<.8*plain.ways[0].peak
    scaled = check(learner(cbs=OnCpu()))
    assert .95<scaled.ways[0].peak/plain.ways[0].peak<1.05
    def large(pred, y): return 64*F.cross_entropy(pred, y)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(576, 500), nn.Linear(500, 3))
    few,skips = (learner(deepcopy(flat), cbs=OnCpu(init_scale=s)) for s in (2.**10,2.**127))   # the first steps
    for o in few,skips: o.loss_func = large
    assert .95<check(skips).ways[0].peak/check(few).ways[0].peak<1.05   # with the state of the optimizer
    assert not torch.is_autocast_cpu_enabled()

def test_what_was_there_before_does_not_count():
    learn = learner(opt_func=Adam)
    new = check(learn).ways[0].peak
    learn.fit(1)   # from now on, it has gradients and the state of the optimizer
    again,state = check(learn).ways[0].peak,2*sum(p.nbytes for p in learn.model.parameters())
    held = sum(p.grad.nbytes for p in learn.model.parameters() if p.grad is not None)
    assert abs(new-again-state-held)<.05*new, (new, again, state, held)

def test_a_model_that_compares_samples_is_not_called_the_same():
    class Centred(nn.Module):
        def forward(self, x): return x-x.mean(0)
    found = check(learner(nn.Sequential(net(), Centred())))
    cut = plain_slices(found)
    assert cut.changes=='as the check says'

def test_what_is_refused_is_left_out():
    class Resets(nn.Module):
        def __init__(self): super().__init__(); self.net = net()
        def forward(self, x): return self.net(x)
        def reset(self): pass
    found = check(learner(Resets()))
    assert found.ways[0].time and 'has a reset()' in found.note
    assert not any('micro_batch' in o.line for o in found.ways)

def test_errors_of_your_own_are_raised():
    class Broken(nn.Module):
        def __init__(self): super().__init__(); self.net = net()
        def forward(self, x): return self.net(x)[:,9]
    with pytest.raises(IndexError): fits(learner(Broken()))
    with pytest.raises(ValueError, match='no training loader'):
        Learner(DataLoaders(), net(), loss_func=nn.MSELoss()).what_fits()

def test_one_sample_cannot_be_cut():
    assert not any('micro_batch' in o.line for o in check(learner(bs=1)).ways)

def test_loaders_of_pytorch():
    data = [(torch.randn(1, 24, 24), i%3) for i in range(40)]
    dl = torch.utils.data.DataLoader(data, batch_size=16, num_workers=2)
    found = check(quiet(Learner(DataLoaders(dl, dl), net(), loss_func=nn.CrossEntropyLoss())), '1GB')
    assert found.best.line=='' and 'on 16 samples' in found.note

def test_on_a_simulated_device(fakegpu):
    "Activations move to the host"
    learn = learner(net(norm=nn.BatchNorm2d))
    learn.dls.to('fakegpu:0')
    ways = {o.line:o for o in check(learn, 1024).ways}   # in which nothing fits, so all ways are tried
    whole,moved = ways[''],ways['learn.offload_activations()']
    assert moved.peak<.6*whole.peak and moved.is_same and whole.fits is False
    assert next(learn.model.parameters()).device.type=='cpu'

def test_the_budget_of_a_device(fakegpu, monkeypatch):
    "With a stand-in for the allocator: 1000 bytes are free, 300 are kept for new tensors, and `f` takes 250 at most"
    now = dict(memory_allocated=500, memory_reserved=800, max_memory_allocated=500)
    for k in now: monkeypatch.setattr(fakegpu, k, lambda d, k=k: now[k])
    monkeypatch.setattr(fakegpu, 'mem_get_info', lambda d: (1000, 9999))
    monkeypatch.setattr(fakegpu, 'reset_peak_memory_stats', noop)
    device = torch.device('fakegpu:0')
    assert ways.free_bytes(device)==.9*1300
    assert ways.peak_bytes(lambda: now.update(memory_allocated=600, max_memory_allocated=750), device)==250

@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_on_a_gpu():
    learn = learner(bs=64, px=64)
    learn.dls.device = torch.device('cuda')
    found = fits(learn)
    assert found.budget>0 and found.best.line==''
    def taken(): torch._C._cuda_clearCublasWorkspaces(); return torch.cuda.memory_allocated()   # which PyTorch keeps
    whole,before = found.ways[0].peak,taken()
    found = fits(learn, int(.5*whole))
    assert found.best and found.best.is_same
    assert abs(taken()-before)<1e6
    torch.cuda.set_per_process_memory_fraction(.9*whole/torch.cuda.get_device_properties(0).total_memory)
    try: assert fits(learn, '1GB').ways[0].peak is None
    finally: torch.cuda.set_per_process_memory_fraction(1.)
