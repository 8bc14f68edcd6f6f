//! [`StepGrant`]: what a step owns.

use crate::gradients::params::Gradients;
use crate::token::Token;

/// What a step owns.
#[derive(Debug)]
pub(crate) struct StepGrant {
    pub(crate) token: Token,
    pub(crate) gradients: Gradients,
    /// The number of the step among those of the session.
    pub(crate) number: u64,
}
