"A trial of ours is no training: nothing logs, tracks, saves or draws it, and the next fit is as if nothing had been"
import matplotlib,pytest
from harness import *
from fastai_accum.all import *
from fastai.vision.gan import GANLearner,basic_critic,basic_generator
from torchvision.ops import stochastic_depth
matplotlib.use('Agg')

class Logs(Callback):
    "As the loggers of fastai: keeps off in `lr_find` and while predictions are gathered"
    order = 70
    def __init__(self): self.n = 0
    def before_fit(self): self.run = not hasattr(self.learn, 'lr_finder') and not hasattr(self.learn, 'gather_preds')
    def after_batch(self): self.n += 1

class Projects(Callback):
    "As fastai's `TensorBoardProjectorCallback`, which works only while predictions are gathered"
    def __init__(self): self.n = 0
    def before_fit(self): self.run = not hasattr(self.learn, 'lr_finder') and hasattr(self.learn, 'gather_preds')
    def after_pred(self): self.n += 1

trials = dict(what_fits=lambda l: l.what_fits('1KB'), check=lambda l: l.check_accumulation(),
              noise=lambda l: l.noise_scale(2, 3, False))

@pytest.mark.parametrize('k', trials)
def test_keeps_off(k, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    savers = CSVLogger(),SaveModelCallback(every_epoch=True),EarlyStoppingCallback()
    cbs = [*savers, Logs(), Projects(), ShowGraphCallback()]
    learn = make_learner(make_dls(64, 8), small_model().float(), cbs=cbs, path=tmp_path, splitter=params,
                         loss_func=lambda pred, y: F.cross_entropy(pred, y))
    for dl in learn.dls.loaders: dl.dataset.x = dl.dataset.x.float()
    learn.add_cb(ProgressCallback())
    trials[k](learn)
    assert learn.logs.n==0 and learn.projects.n==0
    assert not list(tmp_path.rglob('*.csv')) and not list(tmp_path.rglob('*.pth'))
    assert not {'lr_finder','gather_preds'} & set(vars(learn))
    learn.remove_cbs(learn.cbs.filter(risinstance((MicroBatch,ProgressCallback,ShowGraphCallback))))
    learn.fit(1)
    assert learn.logs.n==8+2 and learn.projects.n==0
    assert len(list(tmp_path.rglob('*.pth')))==1
    assert len((tmp_path/'history.csv').read_text(encoding='utf-8').splitlines())==2

def test_a_gan_is_told_that_the_check_is_not_for_it():
    x = torch.randn(8, 3, 16, 16)
    dls = DataLoaders(*(DataLoader(list(zip(torch.randn(8, 4, 1, 1), x)), bs=4) for _ in range(2)))
    learn = GANLearner.wgan(dls, basic_generator(16, 3, 4), basic_critic(16, 3))
    with pytest.raises(ValueError, match='GANLearner trains two models in turn.*a Learner of its own'):
        learn.check_accumulation()

class Depth(nn.Module):
    "Leaves out samples, or the whole batch, at random: of two views of it or of one"
    def __init__(self, mode, p, n_views): super().__init__(); store_attr(); self.a = nn.Linear(8,8).double()
    def forward(self, h):
        h = torch.cat([h,h.flip(1)][:self.n_views])
        return sum((h+stochastic_depth(self.a(h), self.p, self.mode, self.training)).chunk(self.n_views))

@pytest.mark.parametrize('mode,p,n_views,is_exact',
                         [('row',.05,2,False), ('row',.02,2,False), ('batch',.1,2,True), ('row',.1,1,True)])
def test_the_check_names_only_what_the_fit_accepts(mode, p, n_views, is_exact):
    def learner(bs, cb):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6,8), Depth(mode, p, n_views), nn.Linear(8,3)).double()
        return make_learner(make_dls(64, bs), model, nn.CrossEntropyLoss(), cbs=cb, splitter=params)
    assert ('(bs=8, exact=True)' in str(learner(8, AccumulateStep(4)).check_accumulation()))==is_exact
    exact = learner(32, MicroBatch(8, exact=True))
    if is_exact: return exact.fit(1)
    with pytest.raises(ValueError, match='exact=True is not possible'): exact.fit(1)
