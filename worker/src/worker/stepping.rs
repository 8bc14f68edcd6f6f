//! A push, the next token and the values for it, as one operation.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use pushpull_common::ids::GlobalStep;

use super::{PushHandle, Worker, token_of};
use crate::error::Error;
use crate::gradients::params::{Gradients, Params};
use crate::outcome::{Pulled, Push, StepOutcome};
use crate::pull_client::{ParamsPull, ReplicaValues};
use crate::runtime::{Caller, OperationFuture};
use crate::session::{ReadPoint, SessionCommand};
use crate::token::Token;

impl Worker {
    /// Pushes gradients, takes the next token and pulls the values for it: [`Worker::push`],
    /// [`Worker::token`] and [`Worker::pull`] with one wait instead of three.
    ///
    /// In synchronous mode, and if one shard holds all variables, the pull request is sent directly
    /// behind the gradients. Otherwise, and if the values are read in shared memory, the pull
    /// starts once the token has arrived, as it does with pulls in place
    /// ([`WorkerConfig::in_place_pulls`](crate::WorkerConfig::in_place_pulls)). If
    /// [`StepOutcome::next`] is a token, `params` holds the values for it; otherwise `params` may or
    /// may not have been replaced.
    ///
    /// # Errors
    /// Those of [`Worker::push`]. Errors of the token and of the pull are in [`StepOutcome::next`].
    ///
    /// Dropping the future has the effect of dropping the [`PushHandle`].
    pub async fn push_and_pull(
        &mut self,
        token: Token,
        gradients: Gradients,
        params: &mut Params,
    ) -> Result<StepOutcome, Error> {
        let model = self.model("push")?.clone();
        if !model.plan.is_same(&params.plan) {
            return Err(Error::ForeignBuffer);
        }
        let next = step_after(&token);
        let synchronous = self.client.settings.synchronous;
        let push = self.push(token, gradients);
        let mapped = self.client.caller.mapped_shards();
        let shared = mapped.is_some_and(|mapped| mapped.share_all(model.plan.shards()));
        // In asynchronous mode a shard other than the step owner would answer without this push,
        // and so would a read of mapped values.
        let early = synchronous || !(shared || model.plan.shards() != [self.client.owner]);
        // A pull in place that turns out to be of no use would leave no values.
        let early = early && !self.client.config.in_place_pulls;
        let Some(next) = next.filter(|_| early) else {
            let push = push.await?;
            return Ok(StepOutcome { push, next: self.next(push, None, None, params).await });
        };
        // Mapped values are read once the token is there.
        let pull =
            (!shared).then(|| self.client.pulls.start(params, Some(next), ReplicaValues::Keep));
        // In asynchronous mode the token comes with the answer to the push.
        let timeout = self.client.config.timeout;
        let ask = || self.client.caller.call("take a token", SessionCommand::Token, timeout);
        let token_call = synchronous.then(ask);
        let caller = &model.caller;
        let pushed = None;
        let values = None;
        let granted = None;
        let (push, values, token_call, granted) = {
            let mut pending =
                PushAndPull { caller, next, push, pushed, pull, values, token_call, granted };
            let push = poll_fn(|context| pending.poll(context)).await?;
            // The pull borrows the parameters no longer.
            let PushAndPull { values, token_call, granted, .. } = pending;
            (push, values, token_call, granted)
        };
        let granted = match (granted, token_call) {
            (None, Some(token_call)) => {
                Some(token_call.await.and_then(|reply| token_of(&model.caller, reply)))
            }
            (granted, _) => granted,
        };
        Ok(StepOutcome { push, next: self.next(push, granted, values, params).await })
    }

    /// Returns the next token, and pulls the values for it unless `values` are of its step.
    async fn next(
        &mut self,
        push: Push,
        granted: Option<Result<Option<Token>, Error>>,
        values: Option<ReadPoint>,
        params: &mut Params,
    ) -> Result<Option<Token>, Error> {
        let mut next = match granted {
            Some(granted) => {
                self.client.caller.times().count_token(&granted);
                granted?
            }
            None => self.token().await?,
        };
        if let (Some(token), Some(read)) = (&next, values) {
            let synchronous = self.client.settings.synchronous;
            if is_usable(read.step.0, token.step(), push, synchronous) {
                let step = read.step.0;
                token.record_pull(read);
                self.client.caller.times().count_pull(&Ok(Pulled::Pulled { step }));
                return Ok(next);
            }
        }
        while let Some(token) = &next
            && self.pull(token, params).await?.is_stale()
        {
            // The stale token must be returned before another is requested.
            drop(next.take());
            next = self.token().await?;
        }
        Ok(next)
    }
}

/// Returns the step after a token's; `None` after the largest number, which a hostile server may
/// send.
fn step_after(token: &Token) -> Option<GlobalStep> {
    token.step().checked_add(1).map(GlobalStep)
}

/// Whether values of step `read` can be used with a token of step `token` after this push. In
/// asynchronous mode they may be newer, and must contain the push.
fn is_usable(read: u64, token: u64, push: Push, synchronous: bool) -> bool {
    match push {
        _ if synchronous => read == token,
        Push::Applied { step, .. } => read >= token.max(step),
        _ => read >= token,
    }
}

/// A push under way, with the requests for the next values and, in synchronous mode, for the next
/// token.
struct PushAndPull<'a> {
    caller: &'a Caller,
    /// The step of the values that `pull` requests.
    next: GlobalStep,
    push: PushHandle,
    pushed: Option<Push>,
    pull: Option<ParamsPull<'a>>,
    values: Option<ReadPoint>,
    token_call: Option<OperationFuture>,
    granted: Option<Result<Option<Token>, Error>>,
}

impl PushAndPull<'_> {
    /// Polls the push, and the other requests while their answers can still be used.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Push, Error>> {
        if let Some(pull) = &mut self.pull
            && let Poll::Ready(values) = Pin::new(pull).poll(context)
        {
            // An error is dropped here: the pull for the token meets it again.
            self.pull = None;
            self.values = values.ok().flatten();
        }
        if let Some(token_call) = &mut self.token_call
            && let Poll::Ready(reply) = Pin::new(token_call).poll(context)
        {
            let token = reply.and_then(|reply| token_of(self.caller, reply));
            self.token_call = None;
            self.granted = Some(token);
        }
        if !self.expects_values() {
            self.pull = None;
        }
        if self.pushed.is_none()
            && let Poll::Ready(pushed) = Pin::new(&mut self.push).poll(context)
        {
            self.pushed = Some(pushed?);
        }
        if !self.expects_values() {
            self.pull = None;
        }
        match self.pushed {
            Some(pushed) if self.pull.is_none() => Poll::Ready(Ok(pushed)),
            _ => Poll::Pending,
        }
    }

    /// Whether `pull` can still be answered without another gradient of this worker, with values
    /// for the next token.
    fn expects_values(&self) -> bool {
        let counts = self
            .pushed
            .is_none_or(|pushed| matches!(pushed, Push::Applied { .. } | Push::Accepted { .. }));
        // If a replica gives several gradients to a step, the next token may be of the same step.
        let of_next = match &self.granted {
            None => true,
            Some(Ok(Some(token))) => token.step() == self.next.0,
            Some(Ok(None)) => true,
            Some(Err(_)) => false,
        };
        counts && of_next
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};
    use std::time::Duration;

    use pushpull_common::catalogue::Catalogue;
    use pushpull_common::ids::TokenId;
    use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
    use pushpull_common::protocol::{Grant, Outcome};
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::gradients::sharding_plan::ShardingPlan;
    use crate::session::Reply;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn params() -> Params {
        let variables = vec![VariableSpec::f32("w", [2]).unwrap()];
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        Params::new(Arc::new(ShardingPlan::new(Arc::new(
            Catalogue::new(variables, &placement).unwrap(),
        ))))
    }

    /// After a token of the same step, or none, the values are not used. Only the push is awaited
    /// then, and it must wake the task.
    #[test]
    fn a_push_wakes_a_task_that_no_longer_awaits_values() {
        let grant = |step| Grant {
            token: TokenId(2),
            generation: 1,
            step,
            push_slot: 0,
            samples: None,
            ahead: None,
        };
        let same_step = || Ok(Reply::Token(Some(grant(GlobalStep(4)))));
        let none = || Err(Error::Fenced);
        for granted in [&same_step as &dyn Fn() -> Result<Reply, Error>, &none] {
            let (caller, mut orders) = Caller::without_session();
            let mut params = params();
            let forever = Duration::MAX;
            let call = || caller.call("test", SessionCommand::Token, forever);
            let push = PushHandle::new(call(), None);
            let pull = Some(ParamsPull::requested(call(), &mut params));
            let token_call = Some(call());
            let pushed = None;
            let values = None;
            let granted_later = None;
            let mut pending = PushAndPull {
                caller: &caller,
                next: GlobalStep(5),
                push,
                pushed,
                pull,
                values,
                token_call,
                granted: granted_later,
            };
            let [push, _pull, token] = [orders.next(), orders.next(), orders.next()];
            let wakes = Arc::new(Wakes::default());
            let waker = Waker::from(wakes.clone());
            let mut context = Context::from_waker(&waker);
            assert!(pending.poll(&mut context).is_pending());
            token.answer(granted());
            assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
            assert!(pending.poll(&mut context).is_pending());
            push.answer(Ok(Reply::Pushed { outcome: Outcome::Accepted { step: GlobalStep(4) } }));
            assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
            assert!(pending.poll(&mut context).is_ready());
        }
    }

    /// A server may send any number.
    #[test]
    fn no_step_follows_the_largest_number() {
        for (step, next) in [(4, Some(5)), (u64::MAX - 1, Some(u64::MAX)), (u64::MAX, None)] {
            let grant = Grant {
                token: TokenId(2),
                generation: 1,
                step: GlobalStep(step),
                push_slot: 0,
                samples: None,
                ahead: None,
            };
            let (caller, _orders) = Caller::without_session();
            let token = token_of(&caller, Reply::Token(Some(grant))).unwrap().unwrap();
            assert_eq!(step_after(&token), next.map(GlobalStep));
        }
    }

    #[test]
    fn values_for_the_next_step_contain_the_push() {
        let applied = Push::Applied { step: 6, staleness: 0 };
        let stale = Push::Stale { current: 9 };
        for (read, token, push, synchronous, are) in [
            (5, 5, applied, false, false),
            (6, 5, applied, false, true),
            (6, 7, applied, false, false),
            (5, 5, stale, false, true),
            (5, 5, Push::Accepted { step: 5 }, true, true),
            (6, 5, Push::Accepted { step: 5 }, true, false),
        ] {
            assert_eq!(is_usable(read, token, push, synchronous), are, "{read} {token} {push:?}");
        }
    }
}
