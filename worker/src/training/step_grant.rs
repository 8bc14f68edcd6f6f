//! [`StepGrant`]: what a step owns.

use std::sync::Arc;

use crate::gradients::params::Gradients;
use crate::token::Token;

/// Tells the steps of one session from those of another: clones are equal.
#[derive(Clone, Debug, Default)]
pub(crate) struct SessionMark(Arc<()>);

impl PartialEq for SessionMark {
    fn eq(&self, other: &SessionMark) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// What a step owns.
#[derive(Debug)]
pub(crate) struct StepGrant {
    pub(crate) token: Token,
    pub(crate) gradients: Gradients,
    /// The number of the step among those of the session, and the session.
    pub(crate) number: u64,
    pub(crate) session: SessionMark,
}
