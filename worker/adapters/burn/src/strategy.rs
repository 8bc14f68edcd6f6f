//! [`PushPullStrategy`]: burn's `Learner` as a worker.

use std::sync::{Arc, Mutex, PoisonError};

use burn_core::data::dataset::DatasetError;
use burn_core::tensor::Device;
use burn_optim::GradientsAccumulator;
use burn_train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingComponents, TrainingItem, TrainingStrategy, ValidLoader,
};
use pushpull::error::Chain;
use pushpull::training::TrainingEnd;

use crate::error::AdapterError;
use crate::push_pull::{PushPull, PushPullBuilder};

/// A training strategy for burn's `SupervisedTraining`, which makes its `Learner` a worker.
///
/// The loop is that of one device: epochs, events, accumulation of gradients, validation,
/// checkpoints of burn and early stopping. The training ends with the last epoch, or when the
/// servers end it; then the last epoch is validated, and `LearningResult::interrupted` has the
/// reason.
///
/// The servers have the rule and its schedule. The learner's own optimizer and learning rate are not
/// used, and a scheduler that changes the rate is refused ([`AdapterError::Scheduler`]).
///
/// Burn has no error of others that stops a training, so [`PushPullStrategy::end`] returns it.
#[derive(Clone, Debug)]
pub struct PushPullStrategy {
    shared: Arc<SharedStrategy>,
}

#[derive(Debug)]
struct SharedStrategy {
    /// Taken when the training begins.
    builder: Mutex<Option<PushPullBuilder>>,
    device: Device,
    end: Mutex<Option<Result<TrainingEnd, AdapterError>>>,
}

impl PushPullStrategy {
    /// Creates a strategy for one training on one device.
    pub fn new(training: impl Into<PushPullBuilder>, device: Device) -> PushPullStrategy {
        let builder = Mutex::new(Some(training.into()));
        PushPullStrategy {
            shared: Arc::new(SharedStrategy { builder, device, end: Mutex::default() }),
        }
    }

    /// Returns how the training has ended, once. `None` before that, and if burn has ended it
    /// before it began.
    pub fn end(&self) -> Option<Result<TrainingEnd, AdapterError>> {
        self.shared.end.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<M: LearnerModel> From<&PushPullStrategy> for TrainingStrategy<M> {
    fn from(strategy: &PushPullStrategy) -> TrainingStrategy<M> {
        TrainingStrategy::Custom(strategy.shared.clone())
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for SharedStrategy {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        first_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let device = self.device.clone().autodiff();
        learner.fork(&device);
        let mut run = LearnerRun {
            train: train.to_device(&device),
            valid: valid.to_device(&device.inner()),
            components,
            module: learner.model(),
            learner,
        };
        let builder = self.builder.lock().unwrap_or_else(PoisonError::into_inner).take();
        let end = match builder {
            None => Err(AdapterError::Ended { step: 0 }),
            Some(builder) => check_rate_is_constant(run.learner.clone())
                .and_then(|()| run.train(builder, first_epoch)),
        };
        if let Err(error) = &end {
            run.interrupter().stop(Some(&Chain(error).to_string()));
        }
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
        (run.module, run.components.event_processor)
    }
}

/// The number of steps of a scheduler that are checked. Most schedulers change the rate by then.
const STEPS_CHECKED: u32 = 1000;

/// Checks that the scheduler of a learner leaves the learning rate as it is.
fn check_rate_is_constant<M: LearnerModel>(mut learner: Learner<M>) -> Result<(), AdapterError> {
    learner.lr_step();
    let first = learner.lr_current().base();
    for step in 2..=STEPS_CHECKED {
        learner.lr_step();
        let rate = learner.lr_current().base();
        if rate != first {
            return Err(AdapterError::Scheduler { first, step, rate });
        }
    }
    Ok(())
}

/// One training of a learner.
struct LearnerRun<M: LearnerModel> {
    train: TrainLoader<M>,
    valid: ValidLoader<M>,
    components: TrainingComponents<M>,
    learner: Learner<M>,
    /// The module with the newest values.
    module: M,
}

impl<M: LearnerModel> LearnerRun<M> {
    fn interrupter(&self) -> &Interrupter {
        &self.components.interrupter
    }

    /// Tells burn what happens.
    fn event(&mut self, event: SplitEvent<M>) {
        let events = &mut self.components.event_processor;
        let result = match event {
            SplitEvent::Train(event) => events.process_train(event),
            SplitEvent::Valid(event) => events.process_valid(event),
        };
        self.components.interrupter.fail_on_error(result);
    }

    /// Trains until the last epoch, or until the servers, the interrupter or early stopping end it.
    fn train(
        &mut self,
        builder: PushPullBuilder,
        first_epoch: usize,
    ) -> Result<TrainingEnd, AdapterError> {
        let (mut optimizer, module) = builder.from_module(self.module.clone())?;
        self.module = module;
        for epoch in first_epoch..=self.components.num_epochs {
            self.train_epoch(epoch, &mut optimizer)?;
            if self.interrupter().should_stop() {
                break;
            }
            self.validate(epoch);
            self.event(SplitEvent::Train(LearnerEvent::EndEpoch(epoch)));
            if self.ends_after(epoch) || !optimizer.ready() {
                break;
            }
        }
        let has_ended = !optimizer.ready();
        let (end, module) = optimizer.close(self.module.clone())?;
        self.module = module;
        if has_ended && !self.interrupter().should_stop() {
            self.interrupter().stop(Some(&format!("{} at global step {}", end.reason, end.step)));
        }
        Ok(end)
    }

    /// Returns the next item of a loader, unless the training is to stop. An error of the loader
    /// stops it.
    fn take<T>(&self, next: Option<Result<T, DatasetError>>) -> Option<T> {
        match next.filter(|_| !self.interrupter().should_stop())? {
            Ok(item) => Some(item),
            Err(error) => {
                self.interrupter().fail(error);
                None
            }
        }
    }

    /// Takes the steps of one epoch. Returns before its end if the training has ended.
    fn train_epoch(&mut self, epoch: usize, optimizer: &mut PushPull) -> Result<(), AdapterError> {
        let total_items = self.train.num_items();
        self.event(SplitEvent::Train(LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items,
        }));
        let train = self.train.clone();
        let mut items = train.iter();
        let mut accumulator = GradientsAccumulator::new();
        let mut iteration = 0;
        let mut accumulated = 0;
        while optimizer.ready()
            && let Some(item) = self.take(items.next())
        {
            iteration += 1;
            let progress = items.progress();
            let output = TrainStep::step(&self.module, item);
            let gradients = match self.components.grad_accumulation {
                None => Some(output.grads),
                Some(wanted) => {
                    accumulator.accumulate(&self.module, output.grads);
                    accumulated += 1;
                    (wanted <= accumulated || progress.is_completed()).then(|| {
                        accumulated = 0;
                        accumulator.grads()
                    })
                }
            };
            if let Some(gradients) = gradients {
                self.module = optimizer.step(self.module.clone(), gradients)?;
            }
            let item = TrainingItem::new(output.item, progress, Some(iteration), None);
            self.event(SplitEvent::Train(LearnerEvent::ProcessedItem(item)));
        }
        self.event(SplitEvent::Train(LearnerEvent::EndSplit(epoch)));
        Ok(())
    }

    /// Runs the validation set through the module.
    fn validate(&mut self, epoch: usize) {
        let total_items = self.valid.num_items();
        self.event(SplitEvent::Valid(LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items,
        }));
        let module = self.module.valid();
        let valid = self.valid.clone();
        let mut items = valid.iter();
        let mut iteration = 0;
        while let Some(item) = self.take(items.next()) {
            iteration += 1;
            let progress = items.progress();
            let output = InferenceStep::step(&module, item);
            let item = TrainingItem::new(output, progress, Some(iteration), None);
            self.event(SplitEvent::Valid(LearnerEvent::ProcessedItem(item)));
        }
        self.event(SplitEvent::Valid(LearnerEvent::EndSplit(epoch)));
    }

    /// Saves a checkpoint of burn, if it keeps some. Returns whether the training ends here.
    fn ends_after(&mut self, epoch: usize) -> bool {
        let TrainingComponents {
            checkpointer,
            early_stopping,
            event_processor,
            event_store,
            interrupter,
            ..
        } = &mut self.components;
        if checkpointer.is_some() || early_stopping.is_some() {
            interrupter.fail_on_error(event_processor.flush());
        }
        if interrupter.should_stop() {
            return true;
        }
        if let Some(checkpointer) = checkpointer {
            self.learner.load_model(self.module.clone().into_record());
            checkpointer.checkpoint(&self.learner, epoch, event_store);
        }
        early_stopping.as_mut().is_some_and(|stopping| stopping.should_stop(epoch, event_store))
    }
}

/// What happens in a part of the training.
enum SplitEvent<M: LearnerModel> {
    Train(LearnerEvent<<M as TrainStep>::Output>),
    Valid(LearnerEvent<<M as InferenceStep>::Output>),
}
