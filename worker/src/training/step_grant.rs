//! [`StepGrant`]: what a step owns.

use crate::gradients::params::Gradients;
use crate::token::Token;

/// What a step owns.
#[derive(Debug)]
pub(crate) struct StepGrant {
    pub(crate) token: Token,
    pub(crate) gradients: Gradients,
}
