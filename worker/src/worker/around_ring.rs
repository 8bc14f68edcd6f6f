//! The operations of a worker whose dense gradients go around a ring.

use std::time::Duration;

use super::{PushHandle, Worker};
use crate::error::Error;
use crate::gradients::params::Gradients;
use crate::joined_model::{check_finite, check_rows_finite};
use crate::token::Token;

impl Worker {
    /// Takes a token as [`Worker::token`] does, but waits for at most `limit`. A wait that has ended
    /// without one is no error of the metrics.
    #[doc(hidden)]
    pub async fn token_within(&self, limit: Duration) -> Result<Option<Token>, Error> {
        self.model("take a token")?;
        self.request_token_within(limit, false).await
    }

    /// The longest time of an operation.
    #[doc(hidden)]
    pub fn timeout(&self) -> Duration {
        self.client.config.timeout
    }

    /// Checks what this worker alone pushes: its gradient has something, and its rows satisfy the
    /// servers' policy for NaN and infinity.
    ///
    /// # Errors
    /// [`Error::ForeignBuffer`], [`Error::EmptyPush`] and [`Error::NonFiniteRow`].
    #[doc(hidden)]
    pub fn check_own(&self, gradients: &Gradients) -> Result<(), Error> {
        let model = self.model("push")?;
        if !model.plan.is_same(&gradients.plan) {
            return Err(Error::ForeignBuffer);
        }
        if gradients.is_empty() {
            return Err(Error::EmptyPush);
        }
        let mut rows = gradients.memory.rows().iter();
        rows.try_for_each(|rows| {
            let factor = gradients.factor(rows.variable);
            check_rows_finite(model.non_finite, &model.plan, rows, factor)
        })
    }

    /// Checks dense gradients by the servers' policy for NaN and infinity.
    ///
    /// # Errors
    /// [`Error::NonFinite`].
    #[doc(hidden)]
    pub fn check_dense(&self, gradients: &Gradients) -> Result<(), Error> {
        let model = self.model("push")?;
        gradients.present().try_for_each(|id| {
            let factor = gradients.factor(id);
            check_finite(model.non_finite, &model.plan, id, gradients.bytes_of(id), factor)
        })
    }

    /// Pushes the rows of these gradients and leaves out the dense ones. Nothing at all may be
    /// left: a step needs a push of each replica.
    #[doc(hidden)]
    pub fn push_rows(&mut self, token: Token, mut gradients: Gradients) -> PushHandle {
        let present: Vec<_> = gradients.present().collect();
        for id in present {
            gradients.factors.remove(&id);
        }
        gradients.memory.present.fill(false);
        self.submit(token, gradients, None)
    }
}
