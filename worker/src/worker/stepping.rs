//! A push, the next token and the values for it as one operation.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use pushpull_common::ids::GlobalStep;

use super::{Worker, token_of};
use crate::client::PullCall;
use crate::error::Error;
use crate::handles::PushHandle;
use crate::outcome::{Push, StepOutcome};
use crate::params::{Gradients, Params};
use crate::runtime::{Call, Caller};
use crate::session::{Command, Read};
use crate::token::Token;

impl Worker {
    /// Pushes gradients, takes the next token and pulls the values for it: what [`Worker::push`],
    /// [`Worker::token`] and [`Worker::pull`] do one after the other, with one wait instead of three.
    ///
    /// The request for the values leaves right behind the gradients where they will be those of the next
    /// token, as they usually are: in synchronous mode, and where one shard holds all variables.
    /// Otherwise, and where values are read in lent memory, that waits until the token is there. `params` is for [`StepOutcome::next`], if that
    /// is a token; if it is not, whether `params` has been replaced is open.
    ///
    /// An error is one of the push, which is as for [`Worker::push`]. Dropping the future does to the push
    /// what dropping its handle does.
    pub async fn push_and_pull(
        &mut self,
        token: Token,
        gradients: Gradients,
        params: &mut Params,
    ) -> Result<StepOutcome, Error> {
        let joined = self.joined("push")?.clone();
        if !joined.plan.is_same(&params.plan) {
            return Err(Error::ForeignBuffer);
        }
        let next = step_behind(&token);
        let synchronous = self.client.welcomed.synchronous;
        let push = self.push(token, gradients);
        let shared = self.client.caller.mapped_shards().share(joined.plan.shards());
        // Another shard than the step owner would send values without what has just been pushed, and
        // so would be those that are read where they lie.
        let early = synchronous || !(shared || joined.plan.shards() != [self.client.owner]);
        let Some(next) = next.filter(|_| early) else {
            let push = push.await?;
            return Ok(StepOutcome { push, next: self.next(push, None, None, params).await });
        };
        // What is lent is read where it lies, once there is a token for it.
        let pull = (!shared).then(|| self.client.pull_for(params, Some(next)));
        // In asynchronous mode it comes with the answer to the push.
        let timeout = self.client.config.timeout;
        let ask = || self.client.caller.call("take a token", Command::Token, timeout);
        let asked = synchronous.then(ask);
        let caller = &joined.caller;
        let (pushed, found, granted) = (None, None, None);
        let mut pending = PushAndPull { caller, next, push, pushed, pull, found, asked, granted };
        let push = poll_fn(|context| pending.poll(context, params)).await?;
        let PushAndPull { found, asked, granted, .. } = pending;
        let granted = match (granted, asked) {
            (None, Some(asked)) => {
                Some(asked.await.and_then(|reply| token_of(&joined.caller, reply)))
            }
            (granted, _) => granted,
        };
        Ok(StepOutcome { push, next: self.next(push, granted, found, params).await })
    }

    /// The next token, if it has not been granted yet, and the values for it, if they are not those that
    /// were found.
    async fn next(
        &mut self,
        push: Push,
        granted: Option<Result<Option<Token>, Error>>,
        found: Option<Read>,
        params: &mut Params,
    ) -> Result<Option<Token>, Error> {
        let mut next = match granted {
            Some(granted) => granted?,
            None => self.token().await?,
        };
        if let (Some(token), Some(read)) = (&next, found) {
            let synchronous = self.client.welcomed.synchronous;
            if are_for(read.step.0, token.step(), push, synchronous) {
                token.has_read(read);
                return Ok(next);
            }
        }
        while let Some(token) = &next
            && self.pull(token, params).await?.is_stale()
        {
            // It is of no more use, and must not be out while another is asked for.
            drop(next.take());
            next = self.token().await?;
        }
        Ok(next)
    }
}

/// The step after that of a token; none after the last number there is, which a server may say.
fn step_behind(token: &Token) -> Option<GlobalStep> {
    token.step().checked_add(1).map(GlobalStep)
}

/// Whether values of a step are those to go on with under a token, behind a push: in asynchronous mode
/// they may be newer, and must have the push.
fn are_for(read: u64, token: u64, push: Push, synchronous: bool) -> bool {
    match push {
        _ if synchronous => read == token,
        Push::Applied { step, .. } => read >= token.max(step),
        _ => read >= token,
    }
}

/// A push under way, with the requests for the next values and perhaps for a token.
struct PushAndPull<'a> {
    caller: &'a Caller,
    /// The step of the values.
    next: GlobalStep,
    push: PushHandle,
    pushed: Option<Push>,
    pull: Option<PullCall>,
    found: Option<Read>,
    asked: Option<Call>,
    granted: Option<Result<Option<Token>, Error>>,
}

impl PushAndPull<'_> {
    /// Polls the push and the requests beside it, as long as their answers can be used.
    fn poll(
        &mut self,
        context: &mut Context<'_>,
        params: &mut Params,
    ) -> Poll<Result<Push, Error>> {
        if let Some(pull) = &mut self.pull
            && let Poll::Ready(found) = pull.poll_into(context, params)
        {
            // Whatever is wrong with it is met again by whoever pulls for the token.
            (self.pull, self.found) = (None, found.ok().flatten());
        }
        if let Some(asked) = &mut self.asked
            && let Poll::Ready(reply) = Pin::new(asked).poll(context)
        {
            let token = reply.and_then(|reply| token_of(self.caller, reply));
            (self.asked, self.granted) = (None, Some(token));
        }
        if !self.values_are_to_come() {
            self.pull = None;
        }
        if self.pushed.is_none() {
            if let Poll::Ready(pushed) = Pin::new(&mut self.push).poll(context) {
                self.pushed = Some(pushed?);
            }
        }
        if !self.values_are_to_come() {
            self.pull = None;
        }
        match self.pushed {
            Some(pushed) if self.pull.is_none() => Poll::Ready(Ok(pushed)),
            _ => Poll::Pending,
        }
    }

    /// Whether the step of the values will be made without more of this worker's doing, and the next token
    /// is for it.
    fn values_are_to_come(&self) -> bool {
        let counts = self
            .pushed
            .is_none_or(|pushed| matches!(pushed, Push::Applied { .. } | Push::Accepted { .. }));
        // A replica may have a share of several gradients in a step.
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
    use crate::session::Reply;
    use crate::sharding_plan::ShardingPlan;

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

    /// A token of the same step, or none at all, says that the values asked for will not be needed:
    /// from then on the push alone is waited for, and has to wake.
    #[test]
    fn a_push_wakes_whoever_does_not_wait_for_values_any_more() {
        let grant = |step| Grant { token: TokenId(2), generation: 1, step, push_slot: 0 };
        let same_step = || Ok(Reply::Token(Some(grant(GlobalStep(4)))));
        let none = || Err(Error::Fenced);
        for granted in [&same_step as &dyn Fn() -> Result<Reply, Error>, &none] {
            let (caller, mut orders) = Caller::alone();
            let (mut params, forever) = (params(), Duration::MAX);
            let call = || caller.call("test", Command::Token, forever);
            let push = PushHandle::new(call(), None);
            let pull = Some(PullCall::asked(call()));
            let asked = Some(call());
            let (pushed, found, granted_later) = (None, None, None);
            let mut pending = PushAndPull {
                caller: &caller,
                next: GlobalStep(5),
                push,
                pushed,
                pull,
                found,
                asked,
                granted: granted_later,
            };
            let [push, _pull, token] = [orders.next(), orders.next(), orders.next()];
            let wakes = Arc::new(Wakes::default());
            let waker = Waker::from(wakes.clone());
            let mut context = Context::from_waker(&waker);
            assert!(pending.poll(&mut context, &mut params).is_pending());
            token.answer(granted());
            assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
            assert!(pending.poll(&mut context, &mut params).is_pending());
            push.answer(Ok(Reply::Pushed { outcome: Outcome::Accepted { step: GlobalStep(4) } }));
            assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
            assert!(pending.poll(&mut context, &mut params).is_ready());
        }
    }

    /// A server says any number.
    #[test]
    fn no_step_follows_the_last_number_there_is() {
        for (step, next) in [(4, Some(5)), (u64::MAX - 1, Some(u64::MAX)), (u64::MAX, None)] {
            let grant =
                Grant { token: TokenId(2), generation: 1, step: GlobalStep(step), push_slot: 0 };
            let (caller, _orders) = Caller::alone();
            let token = token_of(&caller, Reply::Token(Some(grant))).unwrap().unwrap();
            assert_eq!(step_behind(&token), next.map(GlobalStep));
        }
    }

    #[test]
    fn values_to_go_on_with_have_the_push_in_them() {
        let applied = Push::Applied { step: 6, staleness: 0 };
        let stale = Push::Stale { current: 9 };
        for (read, token, push, synchronous, are) in [
            (5, 5, applied, false, false),
            (6, 5, applied, false, true),
            (6, 7, applied, false, false),
            (5, 5, stale, false, true),
            (5, 5, Push::Accepted { step: 4 }, true, true),
            (6, 5, Push::Accepted { step: 4 }, true, false),
        ] {
            assert_eq!(are_for(read, token, push, synchronous), are, "{read} {token} {push:?}");
        }
    }
}
