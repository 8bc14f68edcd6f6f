//! [`RemoteValue`]: the future value of a scheduled call.

use std::sync::Weak;

use tokio::sync::watch;

use super::coordinator::CoordinatorCore;
use super::error::ServiceError;
use super::outputs::Outputs;

/// The state of a scheduled call: `None` until it ends, then its outputs or its error.
pub(crate) type ValueState = Option<Result<Outputs, ServiceError>>;

/// The value of a call that a coordinator has scheduled. A clone is the same value.
#[derive(Clone, Debug)]
pub struct RemoteValue {
    number: u64,
    state: watch::Receiver<ValueState>,
    coordinator: Weak<CoordinatorCore>,
}

impl RemoteValue {
    pub(crate) fn new(
        number: u64,
        state: watch::Receiver<ValueState>,
        coordinator: Weak<CoordinatorCore>,
    ) -> RemoteValue {
        RemoteValue { number, state, coordinator }
    }

    /// Returns the value of a call that has ended already.
    pub(crate) fn ended(number: u64, result: Result<Outputs, ServiceError>) -> RemoteValue {
        RemoteValue::new(number, watch::channel(Some(result)).1, Weak::new())
    }

    /// Returns the number of the call among those of its coordinator, from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Waits until the call has ended, and returns its outputs.
    ///
    /// # Errors
    /// The error of the call; [`ServiceError::Cancelled`] if another call had failed before this
    /// one began, or before it lost its worker; [`ServiceError::EndedBefore`] if it had ended in an
    /// earlier run of the coordinator.
    pub async fn fetch(&self) -> Result<Outputs, ServiceError> {
        let mut state = self.state.clone();
        let is_open = state.borrow().is_none();
        let coordinator = self.coordinator.upgrade().filter(|_| is_open);
        let _fetch = coordinator.map(|coordinator| coordinator.begin_fetch(self.number));
        let doing = format!("fetch the value of call {}", self.number);
        match state.wait_for(Option::is_some).await {
            Ok(ended) => (*ended).clone().unwrap_or(Err(ServiceError::Ended { doing })),
            Err(_) => Err(ServiceError::Ended { doing }),
        }
    }

    /// Returns the outputs if the call has ended; `None` otherwise. Does not wait.
    pub fn try_fetch(&self) -> Option<Result<Outputs, ServiceError>> {
        self.state.borrow().clone()
    }
}
