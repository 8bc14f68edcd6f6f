//! The ledger: a variable that counts how often the gradient of each sample was applied.

use pushpull::error::{VariableError, ViewError};
use pushpull::{Gradients, PsConfig, Sgd, VariableSpec};

/// Name of the variable: one element for each sample to train on.
pub(crate) const NAME: &str = "ledger";

/// Returns the variable for this number of samples.
pub(crate) fn variable(samples: usize) -> Result<VariableSpec, VariableError> {
    VariableSpec::f32(NAME, [samples as u64])
}

/// Trains the ledger by gradient descent of rate 1, beside the rule of the network.
pub(crate) fn serve(config: PsConfig) -> PsConfig {
    config.optimizer_for(NAME, Sgd::new(1.0))
}

/// Makes each of these samples add 1 to its element.
pub(crate) fn enter(gradients: &mut Gradients, samples: &[u64]) -> Result<(), ViewError> {
    let ledger = gradients.view_mut::<f32>(NAME)?;
    ledger.fill(0.0);
    for &sample in samples {
        ledger[sample as usize] -= 1.0;
    }
    Ok(())
}
