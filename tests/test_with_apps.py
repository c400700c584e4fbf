"""Each application that fastai ships, and what people build on top of it, in micro-batches and with the large batch.

`both` trains what a learner function of fastai makes, in float64 (`ready`), with the plain losses of `torch.nn` (see
`harness`)."""
import pandas as pd
from fastai.vision.all import (CategoryBlock, DataBlock, DynamicUnet, Flip, ImageBlock, IndexSplitter, MaskBlock,
                               MultiCategoryBlock, PILImageBW, RegressionBlock, Resize, Rotate, TransformBlock,
                               resnet18, vision_learner)
from fastai.tabular.all import Categorify, FillMissing, Normalize, TabularPandas, tabular_config, tabular_learner
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.text.data import LMDataLoader,SortedDL,pad_chunk
from fastai.text.models.core import AWD_LSTM,get_language_model,get_text_classifier
from fastai.vision.gan import AdaptiveGANSwitcher,FixedGANSwitcher,GANLearner
from torchvision.models.resnet import BasicBlock,ResNet
from sklearn.datasets import load_digits
from matrix import *
from pasted import recipe
from fastai_accum.extras import *

N,VALID = 73,16   # samples in training, of which micro-batches of 8 leave a single one, and in validation
CPU = torch.device('cpu')

def double(cb):
    "Inputs and targets in float64"
    cb.learn.xb,cb.learn.yb = (apply(lambda o: o.double() if torch.is_floating_point(o) else o, b)
                               for b in (cb.xb,cb.yb))

def ready(learn, *cbs):
    "`learn` as `make_learner` would have made it"
    learn.add_cbs([Spy(), Callback(before_batch=double), *cbs])
    learn.remove_cb(ProgressCallback)
    learn.model.double()
    learn.recorder.smooth_loss,learn.logger = AvgSmoothLoss64(),noop
    return learn

def both(make, fit=once, bs=8, n_step=4, weight=None, **kwargs):
    "`fit` what `make(bs)` gives, in micro-batches and with the large batch"
    def train(bs, *cbs):
        set_seed(0)
        learn = ready(make(bs, **kwargs), *cbs)
        fit(learn)
        return learn
    return train(bs, AccumulateStep(n_step, weight=weight)),train(bs*n_step)

def app(name, note, *cases, **kwargs):
    "Make a row of a function that makes a learner for a batch size: what `both` trains, for each of `cases`"
    def wrap(make):
        @row('Applications', name, note=note)
        def test(works): each(kw=cases or [{}])(lambda kw: works(*both(make, **kwargs, **kw)))()
        return test
    return wrap

def loaders(bs, blocks, getters, **kwargs):
    "Items are numbers, of which `getters` make inputs and targets"
    block = DataBlock(blocks, splitter=IndexSplitter(range(N, N+VALID)), getters=getters, **kwargs)
    return block.dataloaders(range(N+VALID), bs=bs, val_bs=VALID, drop_last=False, device=CPU)
def of_tensors(bs, n_inp, *ts):
    return loaders(bs, [TransformBlock]*len(ts), [(o.float() if o.is_floating_point() else o).__getitem__ for o in ts],
                   n_inp=n_inp)

pixels,digit = load_digits(return_X_y=True)
pixels = (pixels.reshape(-1, 8, 8)*15).astype(np.uint8)
def grey(i): return pixels[i]
def colour(i): return np.stack([pixels[i]]*3, -1)
def get_digit(i): return digit[i]
def digits(bs, y=CategoryBlock, get_y=get_digit, **kwargs):
    return loaders(bs, (ImageBlock(PILImageBW), y), [grey, get_y], **kwargs)

def two_heads():
    def f(m, a, b):
        h = torch.tanh(m.a(a)+m.b(b))
        return m.cls(h),m.reg(h)
    return Made(f, a=nn.Linear(6,5), b=nn.Linear(4,5), cls=nn.Linear(5,3), reg=nn.Linear(5,2))

def two_losses(preds, c, r): return F.cross_entropy(preds[0], c) + 2*F.mse_loss(preds[1], r)
def two_losses_by_samples(preds, c, r):
    return F.cross_entropy(preds[0], c, ignore_index=0, reduction='sum')/len(c) + 2*F.mse_loss(preds[1], r)

@app('two inputs, two targets',
     'The loss is the sum of two losses. If one of them ignores targets, let it divide by the samples: '
     '`reduction="sum"` and `/len(y)`.', dict(loss=two_losses), dict(loss=two_losses_by_samples))
def test_two_inputs_two_targets(bs, loss):
    n = N+VALID
    return Learner(of_tensors(bs, 2, features(n), features(n, 4, 1), classes(n), features(n, 2, 2)), two_heads(), loss)

@app('tabular, regression',
     'Embeddings and continuous columns. `use_bn=False, bn_cont=False`, because batch norm would see micro-batches.',
     *tails)
def test_tabular_learner(bs, drop_last):
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(c1=rng.choice(list('abc'), N+VALID), c2=rng.integers(0, 9, N+VALID),
                           x1=rng.normal(size=N+VALID), x2=rng.normal(size=N+VALID)))
    df['y'] = df.x1*(df.c1=='a') + df.c2/5 + rng.normal(size=N+VALID)/9
    df.loc[::7, 'x2'] = np.nan
    to = TabularPandas(df, [Categorify, FillMissing, Normalize], ['c1','c2'], ['x1','x2'], 'y', RegressionBlock(),
                       IndexSplitter(range(N, N+VALID))(df))
    return tabular_learner(to.dataloaders(bs=bs, val_bs=VALID, drop_last=drop_last, device=CPU), [20,10],
                           config=tabular_config(use_bn=False, bn_cont=False), loss_func=nn.MSELoss(), wd=.1)

@app('collaborative filtering', '`EmbeddingDotBias` with `y_range` and weight decay.')
def test_collab(bs):
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(user=rng.integers(0, 12, 100), item=rng.integers(0, 15, 100),
                           rating=rng.integers(1, 6, 100).astype(float)))
    # 73 ratings in training
    dls = CollabDataLoaders.from_df(df, .27, seed=0, bs=bs, val_bs=VALID, drop_last=False, device=CPU)
    return collab_learner(dls, 5, y_range=(.5,5.5), loss_func=lambda pred, y: F.mse_loss(pred, y.flatten()), wd=.1)

def facts(i):
    return [k for k,v in dict(even=digit[i]%2==0, big=digit[i]>6, prime=digit[i] in (2,3,5,7),
                              round=digit[i] in (0,6,8,9)).items() if v]
def multilayer(n_in, n_out): return nn.Sequential(nn.Flatten(), nn.Linear(n_in, 10), nn.Tanh(), nn.Linear(10, n_out))

@app('multi-label classification', '`MultiCategoryBlock` and `BCEWithLogitsLoss`, with and without `pos_weight`.',
     *[dict(pos_weight=o) for o in (None, tensor([1.,5.,2.,.5]).double())])
def test_multi_label(bs, pos_weight):
    loss = nn.BCEWithLogitsLoss(pos_weight=pos_weight)
    return Learner(digits(bs, MultiCategoryBlock, facts), multilayer(64, 4), loss)

def void_mask(i):
    "1 for ink, 0 for paper and 255, to be ignored, for what lies between"
    return np.where(pixels[i]>150, 1, np.where(pixels[i]<30, 0, 255)).astype(np.uint8)

@app('segmentation', '`DynamicUnet` on two convolutions. Group norm replaces its batch norm, and `ignore_index` leaves '
     'out void pixels.')
def test_unet_with_group_norm(bs):
    encoder = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU())
    unet = recipe('tutorials/keep_batch_norm.ipynb', 'to_group_norm')(DynamicUnet(encoder, 2, (8,8)))
    # the last one turns the predictions into a `TensorBase`, and float64 into float32
    unet.layers = unet.layers[:-1]
    return Learner(digits(bs, MaskBlock(['paper','ink']), void_mask), unet, nn.CrossEntropyLoss(ignore_index=255))

@app('vision, from scratch',
     'A residual network with group norm (`norm_layer`), because batch norm would see micro-batches.',
     fit=lambda learn: learn.fit_one_cycle(1, .002))
def test_group_norm(bs):
    net = ResNet(BasicBlock, [1,1,1,1], num_classes=10, norm_layer=partial(nn.GroupNorm, 8))
    net.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)
    return Learner(digits(bs), net, nn.CrossEntropyLoss())

def frozen_then_all(learn):
    learn.freeze();   learn.fit_one_cycle(1, .01)
    learn.unfreeze(); learn.fit_one_cycle(1, slice(1e-5, 1e-3))

@app('vision, transfer learning',
     '`vision_learner`, not pretrained, with `BatchNormEval` and a head without batch norm. '
     'First frozen, then unfrozen with `slice` learning rates.', fit=frozen_then_all)
def test_transfer(bs):
    dls = loaders(bs, (ImageBlock, CategoryBlock), [colour, get_digit], item_tfms=Resize(16))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 20), nn.ReLU(), nn.Linear(20, 10))
    return vision_learner(dls, resnet18, pretrained=False, custom_head=head, loss_func=nn.CrossEntropyLoss(),
                          cbs=BatchNormEval(), opt_func=SGD)   # its state is half as large as Adam's

def by_image(k, x): return (x*255).round().sum((1,2,3)).remainder(k)

@app('batch transforms',
     '`Flip` and `Rotate`, which depend only on the image here. Usually they are drawn at random for each micro-batch: '
     'you get other draws, with the same distribution.')
def test_batch_transforms(bs):
    tfms = [Flip(p=1., draw=lambda x: by_image(2, x)), Rotate(p=1., draw=lambda x: by_image(41, x)-20)]
    return Learner(digits(bs, batch_tfms=tfms), multilayer(64, 10), nn.CrossEntropyLoss())

@app('dropout', 'The masks depend only on the sample here. Usually they are drawn at random for each micro-batch: '
     'you get other masks, with the same distribution.')
def test_dropout(bs):
    n = N+VALID
    masks = (torch.rand(n, 20, generator=torch.Generator().manual_seed(0))>.4)/.6
    def f(m, x, i): return m.last(torch.tanh(m.first(x))*(masks[i] if m.training else 1))
    return Learner(of_tensors(bs, 2, features(n), torch.arange(n), classes(n)),
                   Made(f, first=nn.Linear(6, 20), last=nn.Linear(20, 3)), nn.CrossEntropyLoss())

def texts(n=N+VALID, vocab=40, longest=30):
    "Token ids of texts of very different lengths"
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.integers(5, vocab, 3 + int(rng.exponential(6)) % (longest-3))) for _ in range(n)]

def collate(items):
    """What many tutorials do: a dictionary, padded to the longest of the batch; labels of a token each are -100
    where padded"""
    ids,ys = zip(*items)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    y = pad(ys, padding_value=-100) if ys[0].ndim else torch.stack(ys)
    return dict(input_ids=pad(ids), attention_mask=pad([torch.ones_like(o) for o in ids])),y

class Unpack(Callback):
    """From a dictionary to the arguments of a transformer, and from its output to logits that `nn.CrossEntropyLoss`
    takes"""
    def before_batch(self): self.learn.xb = self.xb[0]['input_ids'],self.xb[0]['attention_mask']
    def after_pred(self):   self.learn.pred = self.pred.logits if self.y.ndim==1 else self.pred.logits.transpose(1, 2)

def with_labels(model): return Made(lambda m, batch, labels: m.model(**batch, labels=labels), model=model)
def give_labels(cb): cb.learn.xb = *cb.xb,cb.y

def labels(x, head):
    "One for a text, or one for a token: of all, or of some that were masked"
    if head=='SequenceClassification': return (x.sum()%3).long()
    return x%3 if head=='TokenClassification' else torch.where(x%5==0, x, -100)

def bert(head):
    transformers = pytest.importorskip('transformers', reason='trains a model of transformers, which is not installed')
    config = transformers.BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=12, num_labels=3, max_position_embeddings=32,
                                     hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    model = getattr(transformers, f'BertFor{head}')(config)
    # softmax does not see the bias of the keys: its gradient is zero, of which only rounding would be compared
    for k,p in model.named_parameters():
        if k.endswith('key.bias'): p.requires_grad_(False)
    return model

def text_learner(bs, head, model=noop, loss=nn.CrossEntropyLoss(), cb=Unpack):
    items = [(x, labels(x, head)) for x in texts()]
    dl = partial(DataLoader, create_batch=collate)
    dls = DataLoaders(dl(items[:N], bs=bs, shuffle=True), dl(items[N:], bs=VALID), device=CPU)
    return Learner(dls, model(bert(head)), loss, cbs=cb())

# a micro-batch of one text can be without any label, and weighs 0
token_heads = dict(head='TokenClassification'),dict(head='MaskedLM'),dict(head='MaskedLM', bs=1, n_step=16)

test_sequence_classification = app('transformers, classification',
    'A callback gives the model its dictionaries and takes `.logits` from its output. Each batch is padded to its '
    'longest text.', head='SequenceClassification')(text_learner)
test_token_labels = app('transformers, one label per token',
    'Token classification and masked language modelling. The label is -100 where there is none.',
    *token_heads)(text_learner)
test_own_loss = app('transformers, `output.loss`',
    'Give `weight=lambda out, y: (y!=-100).sum()`, because a loss that the model computes does not say what its mean '
    'divides by.', *token_heads, weight=lambda out, y: (y!=-100).sum(), model=with_labels, loss=lambda out, y: out.loss,
    cb=lambda: Callback(before_batch=give_labels))(text_learner)

# so small that no weight is dropped; of 0 recent PyTorch returns the parameter itself, which `WeightDropout` cannot
# take
no_dropout = dict(hidden_p=0., input_p=0., embed_p=0., weight_p=1e-20, output_p=0.)
lm_config = dict(emb_sz=6, n_hid=10, n_layers=2, pad_token=1, bidir=False, tie_weights=True, out_bias=True,
                 **no_dropout)

def lm_by_hand(model, batches, n_step, n_epoch, lr):
    """Windows of the same streams in plain PyTorch: the tokens' losses summed and divided by the tokens of the
    window. Returns the loss of each step"""
    opt,losses = torch.optim.AdamW(model.parameters(), lr),[]
    for _ in range(n_epoch):
        model.reset()
        for i in range(0, len(batches), n_step):
            window = batches[i:i+n_step]
            n = sum(y.numel() for _,y in window)
            loss = sum(TokenLoss(reduction='sum')(model(x)[0], y)/n for x,y in window)
            loss.backward()
            opt.step(); opt.zero_grad()
            losses.append(loss.item())
    return losses

@row('Applications', 'language model',
     'the weights and the loss of each step, with a loop in plain PyTorch over the same batches',
     note='AWD-LSTM carries its state from batch to batch, and the last batch is short. We compare with a loop, '
          'because a loader with a larger batch size cuts the text into other streams.')
def test_stream_of_texts(works):
    dl = LMDataLoader(texts(n=89), bs=8, seq_len=10)
    n_tokens = [y.numel() for _,y in dl]
    assert len(n_tokens)%4>1 and 0<n_tokens[-1]<n_tokens[0], 'the tail is to end with a short micro-batch'
    model,by_hand = (get_language_model(AWD_LSTM, 40, lm_config).double() for _ in range(2))
    by_hand.load_state_dict(model.state_dict())
    learn = ready(Learner(DataLoaders(dl, dl, device=CPU), model, TokenLoss(), cbs=rnn_cbs(),
                          opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), AccumulateStep(4))
    learn.recorder.smooth_loss.beta = 0   # records losses as they are
    learn.fit(2, .01)
    works.same(learn.recorder.losses, lm_by_hand(by_hand, list(dl), 4, 2, .01), 'losses')
    works.same(weights(learn), list(by_hand.parameters()), 'weights')

def pad_even(samples, seq_len=4):
    "Pad as fastai's `pad_input_chunk` does, but to a multiple of `seq_len`"
    n = math.ceil(max(len(x) for x,_ in samples)/seq_len)*seq_len
    return [(pad_chunk(x, seq_len=seq_len, pad_len=n),y) for x,y in samples]

@app('text classification',
     'AWD-LSTM with layer norm instead of batch norm in its head. Batches are sorted by length and padded to a '
     'multiple of `seq_len`. With the padding of fastai, the prediction for a text depends on the other texts of its '
     'batch. When `SortedDL` shuffles, another batch size gives other batches.')
def test_text_classification(bs):
    items = [(x, (x==7).any().long()) for x in texts()]
    dl = partial(SortedDL, sort_func=lambda o: len(o[0]), before_batch=pad_even)
    model = get_text_classifier(AWD_LSTM, 40, 2, seq_len=4, config=dict(emb_sz=6, n_hid=10, n_layers=2, **no_dropout),
                                ps=[0.], lin_ftrs=[8])
    for o in model[1].layers: o[0] = nn.LayerNorm(o[0].num_features)
    return Learner(DataLoaders(dl(items[:N], bs=bs), dl(items[N:], bs=VALID), device=CPU), model, nn.CrossEntropyLoss(),
                   cbs=rnn_cbs())

def fooled(fake_pred, output, target): return F.softplus(-fake_pred).mean()
def told_apart(real_pred, fake_pred): return (F.softplus(-real_pred)+.5*F.softplus(fake_pred)).mean()

class Modes(Callback):
    "Which networks each window has trained"
    def before_fit(self): self.windows,self.now = [],set()
    def before_batch(self):
        if self.training: self.now.add(self.learn.gan_trainer.gen_mode)
    def after_step(self): self.windows.append(self.now); self.now = set()

def gan(bs, switcher):
    learn = GANLearner(of_tensors(bs, 1, features(N+VALID, 4), features(N+VALID, 5, 1)), small_model(4, 5, 0),
                       small_model(5, 1, 1), fooled, told_apart, switcher=switcher(), switch_eval=False, cbs=Modes())
    learn.gan_trainer.gen_loss,learn.gan_trainer.crit_loss = AvgSmoothLoss64(),AvgSmoothLoss64()
    learn.metrics = learn.metrics[:1]   # in validation `crit_loss` is that of the last micro-batch of training
    return learn

@row('Applications', 'GAN',
     note='The switchers of fastai switch after whole windows. The metric `crit_loss` and the smoothed losses of '
          '`GANTrainer` are those of micro-batches, so we do not compare them.')
@each(switcher=[partial(FixedGANSwitcher, 2, 1), partial(AdaptiveGANSwitcher, .7, 1.)])
def test_gan(switcher, works):
    a,b = both(gan, switcher=switcher)
    assert set().union(*b.modes.windows)=={True,False}, 'one of the networks was never trained'
    assert all(len(o)<2 for o in a.modes.windows), f'a window has trained both: {a.modes.windows}'
    works(a, b)

class StepCritic(Callback):
    "A second optimizer, for the critic in the model, that steps in `after_batch`"
    def before_fit(self): self.critic_opt = torch.optim.Adam(self.model.critic.parameters(), .01)
    def after_batch(self):
        if self.training: self.critic_opt.step(); self.critic_opt.zero_grad()
    def after_fit(self): self.learn.got = list(self.critic_opt.state.values())

def with_critic():
    "A classifier, and a critic that guesses where it is right"
    def f(m, x):
        pred = m.body(x)
        return pred,m.critic(pred.detach())[:,0]
    return Made(f, body=small_model(), critic=small_model(3, 1, 1))

def both_losses(preds, y):
    right = (preds[0].argmax(1)==y).double()
    return F.cross_entropy(preds[0], y) + F.binary_cross_entropy_with_logits(preds[1], right)

test_second_optimizer = alike(
    case('Applications', 'a second optimizer by hand', *tails, cbs=StepCritic, n=N, model=with_critic,
         loss_func=both_losses, splitter=lambda m: [params(m.body)], check=lambda a,b: b.got,
         note='A callback steps it in `after_batch`. Its parameters belong to the model.'))
