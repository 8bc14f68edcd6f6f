//! [`Model`]: a network with the names of its variables.

use pushpull_common::initializer::Initializer;
use pushpull_common::variable::VariableSpec;
use pushpull_device::{Device, Network};

use super::{Compute, ModelError, StepGradients, StepValues};

/// A network of `pushpull::compute` with the names of its variables.
///
/// Its variables are of `f32`. Matrices begin with [`Initializer::GlorotUniform`], all else with
/// zeros.
#[derive(Clone, Debug)]
pub struct Model<N> {
    network: N,
    names: Vec<String>,
}

impl<N> Model<N> {
    /// Names the variables of a network, in the order of its shapes.
    ///
    /// # Panics
    /// If there are not as many names as shapes.
    pub fn new<B>(network: N, names: impl IntoIterator<Item = impl Into<String>>) -> Model<N>
    where
        N: Network<B>,
    {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        let shapes = network.shapes().len();
        assert!(names.len() == shapes, "{} names for {shapes} tensors", names.len());
        Model { network, names }
    }

    /// The names of the variables.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The network.
    pub fn network(&self) -> &N {
        &self.network
    }

    /// The network, to be used beside the training.
    pub fn network_mut(&mut self) -> &mut N {
        &mut self.network
    }
}

impl<B, N: Network<B>> Compute<B> for Model<N> {
    fn device(&self) -> &Device {
        self.network.device()
    }

    fn variables(&self) -> Result<Vec<VariableSpec>, ModelError> {
        let shapes = self.names.iter().zip(self.network.shapes());
        let specs = shapes.map(|(name, shape)| {
            let initializer = match shape.len() {
                0 | 1 => Initializer::Zeros,
                _ => Initializer::GlorotUniform,
            };
            Ok(VariableSpec::f32(name, shape)?.initializer(initializer))
        });
        specs.collect()
    }

    fn gradients(
        &mut self,
        values: StepValues<'_>,
        batch: B,
        gradients: &mut StepGradients<'_>,
    ) -> Result<f64, ModelError> {
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        let params = values.views(&names)?;
        let out = gradients.views_mut(&names)?;
        Ok(self.network.gradients(&params, batch, out)?)
    }
}
