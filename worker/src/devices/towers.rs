//! [`DeviceTowers`]: one model on several devices of a process.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pushpull_common::variable::VariableSpec;
use pushpull_device::Device;

use super::{Compute, DeviceCopy, ModelError, StepGradients, StepValues};
use crate::gradients::params::{GradientMemory, Gradients, Params};

/// A batch that can be divided among the towers of a model.
pub trait Divide: Sized {
    /// The number of samples.
    fn samples(&self) -> usize;

    /// Cuts the batch before the sample of this index.
    fn split_at(self, sample: usize) -> (Self, Self);
}

/// One model on several devices of a process: each **tower** computes a part of the batch, and
/// their mean is pushed once. The parameters stay in the processor's memory, and devices with
/// memory of their own get a copy for each step.
///
/// Towers compute at the same time, each on a thread of its own. The batch is divided into parts
/// whose numbers of samples differ by at most one; a tower whose part would be empty does not
/// compute. Losses and gradients are means that are weighted by the numbers of samples, so they are
/// those of the whole batch. Their sums are made in one order, in `f64`.
///
/// ```
/// use pushpull_device::{Device, Mlp};
/// use pushpull_worker::devices::{DeviceTowers, Model};
///
/// let tower = |device| Model::new(Mlp::new(device, &[64, 10]), ["w", "b"]);
/// let devices = [Device::pick("cpu:1")?, Device::pick("cpu:1")?];
/// let towers = DeviceTowers::new(devices.map(tower));
/// assert_eq!(towers.len(), 2);
/// # Ok::<(), pushpull_device::ComputeError>(())
/// ```
#[derive(Debug)]
#[doc(alias = "average_gradients")]
pub struct DeviceTowers<C> {
    /// The processor, which has the values and sums the gradients.
    device: Device,
    towers: Vec<Tower<C>>,
}

/// A model on one device, with the gradients that it computed last.
#[derive(Debug)]
struct Tower<C> {
    model: C,
    gradients: Option<Gradients>,
    copy: Option<DeviceCopy>,
    time: Duration,
}

impl<C> DeviceTowers<C> {
    /// Makes a model of one model for each device.
    ///
    /// # Panics
    /// If there is none.
    pub fn new(models: impl IntoIterator<Item = C>) -> DeviceTowers<C> {
        let tower = |model| Tower { model, gradients: None, copy: None, time: Duration::ZERO };
        let towers: Vec<Tower<C>> = models.into_iter().map(tower).collect();
        assert!(!towers.is_empty(), "a model has at least one tower");
        let device = Device::cpu_threads(1).expect("a device of one thread starts none");
        DeviceTowers { device, towers }
    }

    /// The number of towers.
    #[expect(clippy::len_without_is_empty, reason = "there is always one")]
    pub fn len(&self) -> usize {
        self.towers.len()
    }

    /// Returns how long each tower computed for the last batch, copies to and from its device
    /// included. Zero for a tower that had no samples.
    pub fn times(&self) -> impl Iterator<Item = Duration> + '_ {
        self.towers.iter().map(|tower| tower.time)
    }
}

impl<C> Tower<C> {
    fn compute<B>(&mut self, params: &Params, batch: B) -> Result<f64, ModelError>
    where
        C: Compute<B>,
    {
        let plan = &params.plan;
        let memory = match self.gradients.take() {
            Some(used) if used.plan.is_same(plan) => used.memory,
            _ => GradientMemory::new(plan, Arc::default()),
        };
        let gradients = self.gradients.insert(Gradients::new(plan.clone(), memory));
        DeviceCopy::compute(&mut self.copy, &mut self.model, params, batch, gradients)
    }
}

impl<B, C> Compute<B> for DeviceTowers<C>
where
    B: Divide + Send,
    C: Compute<B> + Send,
{
    /// The processor, which has the values and sums the gradients. Each tower copies the values to
    /// its own device.
    fn device(&self) -> &Device {
        &self.device
    }

    fn variables(&self) -> Result<Vec<VariableSpec>, ModelError> {
        let variables = self.towers[0].model.variables()?;
        for (tower, other) in self.towers.iter().enumerate().skip(1) {
            if other.model.variables()? != variables {
                return Err(ModelError::Differs { tower });
            }
        }
        Ok(variables)
    }

    fn gradients(
        &mut self,
        values: StepValues<'_>,
        batch: B,
        gradients: &mut StepGradients<'_>,
    ) -> Result<f64, ModelError> {
        let params = values.host();
        let samples = batch.samples();
        let towers = self.towers.len();
        let mut rest = batch;
        let mut parts = Vec::with_capacity(towers);
        for tower in 0..towers {
            // The first towers have one sample more if they are not equally many.
            let count = samples / towers + usize::from(tower < samples % towers);
            let (part, others) = rest.split_at(count);
            parts.push((count, part));
            rest = others;
        }
        // Without samples the first tower tells what is wrong.
        let has_part = |tower: usize, count: usize| count > 0 || (samples == 0 && tower == 0);
        let results: Vec<(usize, Result<f64, ModelError>)> = thread::scope(|scope| {
            let running = self.towers.iter_mut().zip(parts).enumerate().map(|(index, run)| {
                let (tower, (count, part)) = run;
                tower.time = Duration::ZERO;
                let compute = move || {
                    let since = Instant::now();
                    let loss = tower.compute(params, part);
                    tower.time = since.elapsed();
                    loss
                };
                let running = has_part(index, count).then(|| scope.spawn(compute));
                (count, running)
            });
            let running: Vec<_> = running.collect();
            let joined = running.into_iter().filter_map(|(count, running)| {
                let loss = running?.join();
                Some((count, loss.unwrap_or_else(|panic| std::panic::resume_unwind(panic))))
            });
            joined.collect()
        });
        let mut weights = Vec::with_capacity(results.len());
        let mut mean = 0.0;
        for (tower, (count, loss)) in results.into_iter().enumerate() {
            let failed = |source| ModelError::Tower { tower, source: Box::new(source) };
            let weight = count as f64 / samples as f64;
            mean += weight * loss.map_err(failed)?;
            weights.push(weight);
        }
        let mut parts: Vec<(f64, &mut Gradients)> = weights
            .into_iter()
            .zip(self.towers.iter_mut().filter_map(|tower| tower.gradients.as_mut()))
            .collect();
        gradients.host_mut().set_weighted_sum(&mut parts)?;
        Ok(mean)
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::error::Chain;
    use pushpull_device::{Mlp, Samples, Targets};

    use super::*;
    use crate::devices::Model;
    use crate::testing::plans::plan_of;

    const NAMES: [&str; 2] = ["w", "b"];

    fn model(sizes: [usize; 2]) -> Model<Mlp> {
        Model::new(Mlp::new(Device::cpu_threads(1).unwrap(), &sizes), NAMES)
    }

    /// The loss and the gradients of a batch.
    fn compute<'a>(
        model: &mut impl Compute<Samples<'a>>,
        params: &Params,
        batch: Samples<'a>,
    ) -> Result<(f64, Vec<Vec<f32>>), ModelError> {
        let plan = params.plan.clone();
        let mut gradients =
            Gradients::new(plan.clone(), GradientMemory::new(&plan, Arc::default()));
        let loss = model.gradients(params.into(), batch, &mut (&mut gradients).into())?;
        let views = gradients.views_mut::<f32, 2>(NAMES)?;
        Ok((loss, views.map(|view| view.to_vec()).to_vec()))
    }

    #[test]
    fn batches_are_divided_between_samples() {
        let features = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        for (middle, values) in [(0, 0), (1, 2), (3, 6)] {
            let batch = Targets { features: &features, targets: &[0.1, 0.2, 0.3] };
            assert_eq!(Divide::samples(&batch), 3);
            let (first, rest) = batch.split_at(middle);
            assert_eq!((first.features, rest.features), features.split_at(values));
            assert_eq!((first.targets.len(), rest.targets.len()), (middle, 3 - middle));
            let batch = Samples { features: &features, labels: &[0, 1, 0] };
            let (first, rest) = batch.split_at(middle);
            assert_eq!((first.features, rest.features), features.split_at(values));
            assert_eq!((first.labels.len(), rest.labels.len()), (middle, 3 - middle));
        }
        let none = Targets { features: &[], targets: &[] };
        assert_eq!(none.split_at(0).1.targets.len(), 0);
    }

    #[test]
    fn towers_compute_what_one_model_computes() {
        let mut alone = model([3, 2]);
        let mut params = Params::new(plan_of(alone.variables().unwrap(), 2));
        let mut next = (1..).map(|n| (n as f32 * 0.37).sin());
        for name in NAMES {
            params.view_mut::<f32>(name).unwrap().fill_with(|| next.next().unwrap());
        }
        let features: Vec<f32> = next.take(7 * 3).collect();
        let labels = [0, 1, 1, 0, 1, 0, 0];
        for towers in 1..=4 {
            let mut divided = DeviceTowers::new((0..towers).map(|_| model([3, 2])));
            // A small batch leaves towers without samples, and what they computed before.
            for samples in [7, 2, 5] {
                let batch =
                    Samples { features: &features[..samples * 3], labels: &labels[..samples] };
                let (loss, gradients) = compute(&mut divided, &params, batch).unwrap();
                let (expected, exact) = compute(&mut alone, &params, batch).unwrap();
                assert!((loss - expected).abs() < 1e-6, "{towers} towers, {samples} samples");
                for (found, exact) in gradients.concat().iter().zip(exact.concat()) {
                    assert!((found - exact).abs() < 1e-6, "{found} instead of {exact}");
                }
                let busy = divided.times().filter(|time| !time.is_zero()).count();
                assert_eq!(busy, samples.min(towers));
            }
        }
    }

    #[test]
    fn the_tower_that_fails_is_named() {
        let mut towers = DeviceTowers::new([model([3, 2]), model([3, 2])]);
        let params = Params::new(plan_of(towers.variables().unwrap(), 1));
        let batch = Samples { features: &[0.0; 9], labels: &[0, 1, 2] };
        let error = compute(&mut towers, &params, batch).unwrap_err();
        let expected =
            "tower 1 of the model failed: label 2 of sample 0 is not below the 2 classes";
        assert_eq!(Chain(&error).to_string(), expected);
        let empty = compute(&mut towers, &params, Samples { features: &[], labels: &[] });
        let expected =
            "tower 0 of the model failed: softmax_cross_entropy has no samples to average over";
        assert_eq!(Chain(&empty.unwrap_err()).to_string(), expected);
        let differs = DeviceTowers::new([model([3, 2]), model([4, 2])]).variables().unwrap_err();
        assert!(matches!(differs, ModelError::Differs { tower: 1 }));
    }
}
