//! [`StepGrant`]: the token and the gradients that a step owns.

use std::sync::Arc;

use pushpull_worker::{Gradients, Token};

/// The token and the gradients that a step owns.
#[derive(Debug)]
pub(crate) struct StepGrant {
    pub(crate) token: Token,
    pub(crate) gradients: Gradients,
    /// The number of the step among those of the session, and the session.
    number: u64,
    session: SessionMark,
}

/// Numbers the steps of one session that have begun to compute.
#[derive(Debug, Default)]
pub(super) struct StepNumbers {
    last: u64,
    session: SessionMark,
}

impl StepNumbers {
    /// Returns what the next step owns.
    pub(super) fn grant(&mut self, token: Token, gradients: Gradients) -> StepGrant {
        self.last += 1;
        StepGrant { token, gradients, number: self.last, session: self.session.clone() }
    }

    /// Whether a step is the last one of this session.
    pub(super) fn is_last(&self, grant: &StepGrant) -> bool {
        grant.session == self.session && grant.number == self.last
    }
}

/// Tells the steps of one session from those of another: clones are equal.
#[derive(Clone, Debug, Default)]
struct SessionMark(Arc<()>);

impl PartialEq for SessionMark {
    fn eq(&self, other: &SessionMark) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
