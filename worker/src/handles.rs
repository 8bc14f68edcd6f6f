//! Operations under way, as futures that borrow nothing of the worker: others can be begun meanwhile,
//! and they can be awaited in any order.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pushpull_common::ids::VariableId;
use pushpull_common::protocol::Refusal;

use crate::client::PullCall;
use crate::error::Error;
use crate::outcome::{Pulled, Push};
use crate::params::Params;
use crate::runtime::Call;
use crate::session::Reply;
use crate::sharding_plan::ShardingPlan;
use crate::token::Token;

/// A push under way, from [`crate::Worker::push`]: a future of what becomes of it.
///
/// It goes on whether it is polled or not. If it is dropped before any shard can hold its share whole,
/// the push is withdrawn and the token goes back; after that it is finished in the background.
#[derive(Debug)]
#[must_use = "a push whose handle is dropped is withdrawn"]
pub struct PushHandle {
    call: Call,
    /// The variables that a refusal may be about.
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
            Err(error) => Err(named(self.plan.as_deref(), error)),
        })
    }
}

/// A pull under way, from [`crate::Worker::pull`]: a future of what it finds.
///
/// It goes on whether it is polled or not; the parameters are replaced when it is polled to its end. If
/// it is dropped they are as they were.
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
        let found = ready!(call.poll_into(context, params));
        Poll::Ready(found.map(|read| match read {
            None => Pulled::Stale,
            Some(read) => {
                let step = read.step.0;
                token.has_read(read);
                Pulled::Pulled { step }
            }
        }))
    }
}

/// A pull of one variable under way, from [`crate::Worker::pull_variable`]: a future of what it finds.
///
/// It goes on whether it is polled or not; the values are copied when it is polled to its end. If it is
/// dropped they are as they were.
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
        let found = ready!(call.poll_copied(context, values));
        Poll::Ready(found.map(|read| match read {
            None => Pulled::Stale,
            Some(read) => {
                let step = read.step.0;
                // A gradient is as stale as the oldest variable that it was computed from.
                token.has_read_some(read);
                Pulled::Pulled { step }
            }
        }))
    }
}

/// What a shard says of a variable by its number, told by its name. Elements of rows have other numbers
/// there, and stay with the refusal.
fn named(plan: Option<&ShardingPlan>, error: Error) -> Error {
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
