//! Futures of operations under way. They do not borrow the worker, so other operations can begin
//! meanwhile; await them in any order.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pushpull_common::ids::VariableId;
use pushpull_common::protocol::Refusal;

use crate::client::PullCall;
use crate::error::Error;
use crate::gradients::params::Params;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::outcome::{Pulled, Push};
use crate::runtime::Call;
use crate::session::Reply;
use crate::token::Token;

/// A push under way, from [`crate::Worker::push`]: a future of its outcome.
///
/// The push proceeds whether or not the handle is polled. Dropping the handle before any shard can
/// have the whole of its share withdraws the push and returns the token. After that the push
/// completes in the background.
#[derive(Debug)]
#[must_use = "a push whose handle is dropped is withdrawn"]
pub struct PushHandle {
    call: Call,
    /// Names the variables of refusals.
    plan: Option<Arc<ShardingPlan>>,
}

impl PushHandle {
    pub(crate) fn new(call: Call, plan: Option<Arc<ShardingPlan>>) -> PushHandle {
        PushHandle { call, plan }
    }
}

impl Future for PushHandle {
    type Output = Result<Push, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(match ready!(Pin::new(&mut self.call).poll(context)) {
            Ok(Reply::Pushed { outcome }) => {
                Push::of(outcome).ok_or(Error::Ended { doing: "push" })
            }
            Ok(_) => Err(Error::Ended { doing: "push" }),
            Err(error) => Err(name_variable(self.plan.as_deref(), error)),
        })
    }
}

/// A pull under way, from [`crate::Worker::pull`].
///
/// The pull proceeds whether or not the handle is polled. The poll that completes it replaces the
/// parameters; if the handle is dropped before, they are unchanged.
#[derive(Debug)]
#[must_use = "parameters are replaced when the pull is awaited"]
pub struct PullHandle<'a> {
    pub(crate) call: PullCall,
    pub(crate) token: &'a Token,
    pub(crate) params: &'a mut Params,
}

impl Future for PullHandle<'_> {
    type Output = Result<Pulled, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let PullHandle { call, token, params } = self.get_mut();
        let result = ready!(call.poll_into(context, params));
        Poll::Ready(result.map(|read| match read {
            None => Pulled::Stale,
            Some(read) => {
                let step = read.step.0;
                token.record_pull(read);
                Pulled::Pulled { step }
            }
        }))
    }
}

/// A pull of one variable under way, from [`crate::Worker::pull_variable`].
///
/// The pull proceeds whether or not the handle is polled. The poll that completes it copies the
/// values; if the handle is dropped before, they are unchanged.
#[derive(Debug)]
#[must_use = "values are copied when the pull is awaited"]
pub struct VariableHandle<'a> {
    pub(crate) call: PullCall,
    pub(crate) token: &'a Token,
    pub(crate) values: &'a mut [u8],
}

impl Future for VariableHandle<'_> {
    type Output = Result<Pulled, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let VariableHandle { call, token, values } = self.get_mut();
        let result = ready!(call.poll_copied(context, values));
        Poll::Ready(result.map(|read| match read {
            None => Pulled::Stale,
            Some(read) => {
                let step = read.step.0;
                // A gradient is as stale as the oldest variable that it was computed from.
                token.record_partial_pull(read);
                Pulled::Pulled { step }
            }
        }))
    }
}

/// Turns a refusal that names a variable by id into the error that names it by name. Refusals about
/// sparse rows count elements differently and are kept as they are.
fn name_variable(plan: Option<&ShardingPlan>, error: Error) -> Error {
    let Error::Refused { shard, ref refusal, .. } = error else { return error };
    let variables = plan.map_or(&[][..], |plan| plan.catalogue().variables());
    let spec = |variable: &VariableId| variables.get(variable.0 as usize);
    match refusal {
        Refusal::NonFinite { variable, element, value } => {
            match spec(variable).filter(|variable| !variable.is_sparse()) {
                Some(variable) => Error::NonFinite {
                    variable: variable.name().to_owned(),
                    element: *element as usize,
                    value: *value,
                },
                None => error,
            }
        }
        Refusal::Overflow { variable, element, value } => {
            match spec(variable).filter(|variable| !variable.is_sparse()) {
                Some(variable) => Error::Overflow {
                    variable: variable.name().to_owned(),
                    element: *element as usize,
                    value: *value,
                },
                None => error,
            }
        }
        &Refusal::TableFull { ref variable, rows, more, limit } => match spec(variable) {
            Some(variable) => {
                let variable = variable.name().to_owned();
                Error::TableFull { variable, shard, rows, more, limit }
            }
            None => error,
        },
        _ => error,
    }
}
