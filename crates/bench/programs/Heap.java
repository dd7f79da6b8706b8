import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;

/** Accounts in a map, with a history each. Argument: the number of accounts. */
final class Heap {
    record Entry(long amount, int day, String reason) {}

    static final class Account {
        final int number;
        final List<Entry> history = new ArrayList<>();
        long balance;

        Account(int number) {
            this.number = number;
        }

        void book(long amount, int day, String reason) {
            history.add(new Entry(amount, day, reason));
            balance += amount;
        }
    }

    public static void main(String[] arguments) {
        int count = Integer.parseInt(arguments[0]);
        Random random = new Random(3);
        String[] reasons = {"rent", "wages", "food", "books", "travel"};
        Map<String, Account> accounts = new HashMap<>();
        for (int number = 0; number < count; number++) {
            Account account = new Account(number);
            for (int day = 0; day < 4; day++) {
                account.book(random.nextInt(100_000), day, reasons[random.nextInt(5)] + " " + number);
            }
            accounts.put("account-" + number, account);
        }
        // Transfers: most of them between few accounts. Histories grow, so the collector has work.
        for (int n = 0; n < count; n++) {
            Account from = accounts.get("account-" + (int) (count * Math.pow(random.nextDouble(), 3)));
            Account to = accounts.get("account-" + (int) (count * Math.pow(random.nextDouble(), 3)));
            long amount = random.nextInt(1000);
            from.book(-amount, n, "to " + to.number);
            to.book(amount, n, "from " + from.number);
            if (from.history.size() > 30) {
                from.history.subList(0, 20).clear();
            }
        }
        long sum = 0;
        for (int number = 0; number < count; number++) {
            Account account = accounts.get("account-" + number);
            for (Entry entry : account.history) {
                sum = sum * 31 + entry.amount() + entry.day() + entry.reason().hashCode();
            }
            if (number % (count / 1000) == 0) {
                System.out.println(number + " " + account.balance + " " + account.history.size());
            }
        }
        System.out.println(sum);
    }
}
